"""The elements and scale modes to compare with `mx_conformance.exact`, MX quantization in exact fractions."""

from pt2mx import ELEMENTS, SCALE_FORMATS
from pt2mx.modes import scale_modes

#: the elements with codes of at most a byte, which every kernel supports
NARROW = [name for name, element in ELEMENTS.items() if not element.is_wide]
#: some of the others: integers with the fewest and the most bits, and the most and the fewest exponent bits
WIDE = [
    *("int9", "int12", "int16", "int16_full"),
    *("fp9_e7m1", "fp12_e3m8", "fp16_e1m14", "fp16_e5m10", "fp16_e7m8"),
]


def modes_of(name: str) -> list[str]:
    """Return the scale modes of E8M0 scales that are defined for an element."""
    return list(scale_modes(SCALE_FORMATS["e8m0"], ELEMENTS[name]))
