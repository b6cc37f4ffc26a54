"""The document of `pt2mx.ops.contract`, in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from math import log2

from pt2mx.formats import FORMATS, ElementFormat
from pt2mx.kernels.packing import group_of
from pt2mx.ops.contract import OPERATORS, schema_of
from pt2mx.scale_formats import SCALE_FORMATS, TENSOR_SCALE_RANGE

_LEAST, _MOST = TENSOR_SCALE_RANGE
_BEGINNING = """\
# The operators, for authors of compilers

Programs that pt2mx writes hold aten operators and those below. `import pt2mx` registers them, with kernels for every
device, fake kernels and gradients; a compiler implements the ones that it meets, or takes a program in which
`pt2mx.make_portable` has written them out as aten operators. A converted program holds `quantize_mx` and
`dequantize_mx`, one in training `fake_quantize_mx`; `pt2mx.lower_to_inductor` replaces them by the others.

`python -m pt2mx.ops.contract_text` writes this document from the registered schemas. An operator's version rises with
every change of its schema or of its numbers. Arguments that decide numbers have no default: a file holds them. Files of
older versions, whose schemas had defaults, are read by `pt2mx.load_program`.

## Storage

Along the axis, n values in blocks of `block_size` are `ceil(n / block_size)` scales and the bytes of n codes. Codes are
packed along that axis: as many groups as n codes need, the missing codes of the last one being zeros. In a group the
first code has the lowest bits, and its bytes are little-endian.
"""

_BEHIND_STORAGE = """\
Other elements of 4 and 6 bits are packed like these; a code of another width is in the low bits of a byte,
or of two. A code of b bits is sign, exponent and mantissa from its highest bit on, or an integer in two's complement,
whose value is that integer times `2**(2 - b)`: [the formats](../README.md#formats).

By default a scale is an E8M0 byte e, which multiplies the values of its block by `2**(e - 127)`; 255 marks a block
with an Inf or a NaN, all of whose values dequantize to NaN. How a scale follows from a block, and how values are
rounded: [scale modes and roundings](../README.md#scale-modes-and-roundings).

## Scale formats

The argument `scale_format` names another format. Scales are positive. A scale of one byte has the exponent and mantissa
bits of a float without a sign; the other scales are floats of torch's dtype.
"""

_BEHIND_SCALES = f"""\
Some formats also have one scale t for the whole tensor: `tensor_scale`, a float32 number that `tensor_scale_mx`
computes from the values. In float32, each operation rounded, a code of value v in a block of scale s dequantizes to
`(s * t) * v` with a factor, `(s / t) * v` with a divisor, and `s * v` without t. The scale of a block with an Inf or a
NaN is NaN, and so are all scales if t is not from 2**{int(log2(_LEAST))} to 2**{int(log2(_MOST))}.

The values of `block_rows` rows of `block_size` values share a scale. A scale tensor then has `ceil(rows / block_rows)`
numbers along the dimension of the rows: of the last two dimensions the one that is not the axis, or, where the axis is
neither of them, the dimension before the axis.

Results of quantizing and dequantizing are dense and keep the input's dimension order in memory; matmul results are
contiguous. All but matmuls have the same bits on every device, eager or compiled.
"""

_SCALE_HEADER = ("scale format", "dtype", "exponent", "mantissa", "bias", "largest", "NaN", "tensor scale")
_STORAGE_HEADER = ("element", "bits", "exponent", "mantissa", "bias", "special", "codes of a group", "bytes of a group")


def document() -> str:
    """Return the document."""
    storage = _table(_STORAGE_HEADER, _storage_rows())
    scales = _table(_SCALE_HEADER, _scale_rows())
    parts = [_BEGINNING, storage, _BEHIND_STORAGE, scales, _BEHIND_SCALES, "## Operators\n", *map(_section, OPERATORS)]
    return "\n".join(parts)


def _storage_rows() -> list[tuple[object, ...]]:
    """Return a row for each element: how a code is read, and the smallest group of codes that is whole bytes."""
    rows: list[tuple[object, ...]] = []
    for name, e in FORMATS.items():
        exponent = ("-", "-", "-") if e.is_int else (e.exponent_bits, e.mantissa_bits, e.bias)
        rows.append((f"`{name}`", e.bits, *exponent, _special(e), *group_of(e.bits)))
    return rows


def _scale_rows() -> list[tuple[object, ...]]:
    """Return a row for each scale format: how a scale is read."""
    rows: list[tuple[object, ...]] = []
    for name, scale in SCALE_FORMATS.items():
        dtype, bias = str(scale.dtype).removeprefix("torch."), 127 if scale.is_power_of_two else scale.grid.bias
        numbers = scale.grid.exponent_bits, scale.grid.mantissa_bits, bias, f"{scale.max_value:.6g}", hex(scale.nan)
        rows.append((f"`{name}`", dtype, *numbers, scale.tensor or "-"))
    return rows


def _special(element: ElementFormat) -> str:
    return ", ".join(["Inf"] * element.has_inf + ["NaN"] * element.has_nan) or "-"


def _section(name: str) -> str:
    operator = OPERATORS[name]
    arguments = [(f"`{argument.name}`", argument.meaning) for argument in operator.arguments]
    results = [(f"-> `{result}`" if result else "->", meaning) for result, meaning in operator.results.items()]
    return "\n".join(
        (
            f"### `{name}`\n",
            textwrap.fill(f"Version {operator.version}. {operator.summary()}", 120, break_on_hyphens=False) + "\n",
            f"```\n{schema_of(name)}\n```\n",
            _table(("", ""), [*arguments, *results]),
        )
    )


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    print(document(), end="")
