"""The numbers of a spec that kernels in C++ and in Triton take, by the names that they have there."""

from __future__ import annotations

from typing import Any

from pt2mx.formats import ElementFormat
from pt2mx.kernels.reference import squared_error_bits
from pt2mx.modes import ScaleMode

_OF_ELEMENT = (
    *("bits", "mantissa_bits", "bias", "emin", "emax", "max_code", "max_normal", "lowest"),
    *("has_inf", "has_nan", "is_int", "full_range"),
)


def spec_constants(element: ElementFormat, mode: ScaleMode, block_size: int) -> dict[str, Any]:
    """Return name -> number: fields of the element, and those of the scale mode for this element and blocks.

    `threshold`: the mantissa in fp32 above which a block's largest magnitude raises the exponent of its scale.
    `exponent_offsets`: added to that exponent, the candidates among which a mode that `searches` chooses.
    `error_bits`: bits of a squared error that it compares.
    """
    return {
        **{name: getattr(element, name) for name in _OF_ELEMENT},
        "threshold": mode.threshold(element),
        "exponent_offsets": mode.exponent_offsets,
        "searches": mode.searches,
        "error_bits": squared_error_bits(block_size),
    }
