"""The document of `pt2mx.ops.contract`, in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from pt2mx.formats import FORMATS, ElementFormat
from pt2mx.kernels.packing import group_of
from pt2mx.ops.contract import OPERATORS, schema_of

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

A scale is an E8M0 byte e, which multiplies the values of its block by `2**(e - 127)`; 255 marks a block with an
Inf or a NaN, and all of whose values are NaN. How it follows from a block, and how values are rounded:
[scale modes and roundings](../README.md#scale-modes-and-roundings).

Results of quantizing and dequantizing are dense and keep the input's dimension order in memory; matmul results are
contiguous. All but matmuls have the same bits on every device, eager or compiled.
"""

_STORAGE_HEADER = ("element", "bits", "exponent", "mantissa", "bias", "special", "codes of a group", "bytes of a group")


def document() -> str:
    """Return the document."""
    storage = _table(_STORAGE_HEADER, _storage_rows())
    parts = [_BEGINNING, storage, _BEHIND_STORAGE, "## Operators\n", *map(_section, OPERATORS)]
    return "\n".join(parts)


def _storage_rows() -> list[tuple[object, ...]]:
    """Return a row for each element: how a code is read, and the smallest group of codes that is whole bytes."""
    rows: list[tuple[object, ...]] = []
    for name, e in FORMATS.items():
        exponent = ("-", "-", "-") if e.is_int else (e.exponent_bits, e.mantissa_bits, e.bias)
        rows.append((f"`{name}`", e.bits, *exponent, _special(e), *group_of(e.bits)))
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
