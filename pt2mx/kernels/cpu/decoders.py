"""The decoders of the C++ (`src/decode.h`), and the values of codes that they look up."""

from __future__ import annotations

import ctypes
import functools

from pt2mx.formats import ELEMENTS
from pt2mx.kernels import elements
from pt2mx.spec import MXSpec

__all__ = ["TABLE", "decoder_of", "table_of"]

#: element that the C++ decodes in registers, in blocks of whole groups of 32 -> the number of its decoder
_FORMATS = {
    **{name: 1 for name, element in ELEMENTS.items() if element.bits == 4},
    **{"fp8_e4m3": 2, "fp8_e5m2": 3, "fp6_e3m2": 4, "fp6_e2m3": 5, "int8": 6, "int8_full": 6},
}
TABLE, _GROUP = 0, 32


def decoder_of(spec: MXSpec, k: int) -> tuple[int, int]:
    """Return the C++ decoder for rows of `k` values, and the block size; a row of one block is padded to whole
    groups."""
    block = spec.block_size if spec.block_size < k else -(-k // _GROUP) * _GROUP
    least = _GROUP if spec.has_power_of_two_scale else _GROUP // 2
    return TABLE if block % least else _FORMATS.get(spec.element.name, TABLE), block


@functools.cache
def table_of(name: str) -> ctypes.Array[ctypes.c_float]:
    """Return the value of the code in each of the 256 possible bytes."""
    element = ELEMENTS[name]
    return (ctypes.c_float * 256)(*elements.values_of_codes(element) * (256 >> element.bits))
