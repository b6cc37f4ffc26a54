"""Write Python's tables for C++: elements, modes, and the schemas of the operators that packages call.

    python -m pt2mx.cpp.tables

writes them to `src/` as arrays.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path

from pt2mx.formats import BUILT_IN, ElementFormat
from pt2mx.kernels.cpu.linear import decoder_of
from pt2mx.kernels.packing import group_of
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.ops.contract import schema_of
from pt2mx.spec import MXSpec

SOURCES = Path(__file__).parent / "src"

#: operators that Inductor leaves as calls in a package for the CPU; it generates code for the others
OPERATORS = (
    "linear_mx",
    "grouped_linear_mx",
    "conv2d_mx",
    "attention_mx",
    "matmul_bfloat16",
    "attention_bfloat16",
    "hadamard",
    "rotated_fake_quantize_mx",
    "activation_fake_quantize_mx",
    "layer_norm_fake_quantize_mx",
    "linear_fake_quantize_mx",
    "conv2d_fake_quantize_mx",
    "random_bits",
)

_ELEMENT = ("bits", "mantissa_bits", "emin", "emax", "max_code", "is_int", "full_range")
_UNDEFINED = -2  # `kUndefined`
_BEGINNING = """\
// Written by `python -m pt2mx.cpp.tables`, from the tables of pt2mx in Python.
// clang-format off
"""


def files() -> dict[Path, str]:
    """Return the text of each file."""
    elements = (
        _array("Element kElements", map(_element, (e for e in BUILT_IN.values() if not e.is_wide))),
        _array("ScaleMode kScaleModes", map(_scale_mode, SCALE_MODES)),
        _array("const char* kRoundings", map(json.dumps, ROUNDINGS)),
    )
    schemas = (_array("const char* kSchemas", map(_schema, OPERATORS)),)
    contents = {"elements.inc": elements, "schemas.inc": schemas}
    return {SOURCES / name: "\n".join((_BEGINNING, *arrays)) for name, arrays in contents.items()}


def _array(declaration: str, rows: Iterable[str]) -> str:
    return f"constexpr {declaration}[] = {{\n" + "".join(f"    {row},\n" for row in rows) + "};\n"


def _schema(name: str) -> str:
    lines = textwrap.wrap(str(schema_of(name)).removeprefix("pt2mx::"), 100)
    return "\n    ".join(map(json.dumps, (*(f"{line} " for line in lines[:-1]), lines[-1])))


def _element(element: ElementFormat) -> str:
    """Return an initializer of the C++ struct `Element`."""
    fields = [getattr(element, name) for name in _ELEMENT]
    decoder, _ = decoder_of(MXSpec(element, 32), 32)
    modes = SCALE_MODES.values()
    thresholds = [mode.threshold(element) if mode.is_defined_for(element) else _UNDEFINED for mode in modes]
    numbers = (decoder, *map(int, fields), *group_of(element.bits))
    limits = (f"{float(limit)}f" for limit in (element.max_normal, element.lowest))
    return f'{{"{element.name}", {", ".join((*map(str, numbers), *limits))}, {{{", ".join(map(str, thresholds))}}}}}'


def _scale_mode(name: str) -> str:
    offsets = SCALE_MODES[name].exponent_offsets
    return f'{{"{name}", {len(offsets)}, {{{", ".join(map(str, offsets))}}}}}'


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
