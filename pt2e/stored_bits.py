"""Count the bytes of a packed tensor, and explain where it takes more bits than its format has."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pt2mx.kernels.packing import group_of, packed_length
from pt2mx.spec import MXSpec

#: a note is given if scales and padding add this share to the bits of a value
_NOTED = 0.25


def packed_bytes(shape: Sequence[int], spec: MXSpec) -> int:
    """Return the bytes of the codes and scales of a tensor of this shape."""
    length = shape[spec.axis]
    rows = math.prod(shape) // length if length else 0
    return rows * (packed_length(length, spec.element.bits) + -(-length // spec.block_size))


def storage_note(shape: Sequence[int], spec: MXSpec) -> str | None:
    """Explain why a packed tensor takes more bits than its format has; None if it does not.

    Example:
        >>> import pt2mx
        >>> from pt2mx.pt2e.stored_bits import storage_note
        >>> storage_note((64, 1, 3, 3), pt2mx.MXSpec("mxfp4", axis=1))  # a depthwise convolution
        '16 bits a value: 1 value a block, which has a scale and whole bytes of its own'
        >>> storage_note((64, 64), pt2mx.MXSpec("int5"))
        '8.25 bits a value: codes of 5 bits take 8'
        >>> storage_note((64, 64), pt2mx.MXSpec("mxfp4"))
    """
    values = math.prod(shape)
    if not values:
        return None
    codes, size = group_of(spec.element.bits)
    width, length = 8 * size // codes, shape[spec.axis]
    bits = 8 * packed_bytes(shape, spec) / values
    reasons = [f"codes of {spec.element.bits} bits take {width}"] if width != spec.element.bits else []
    if bits >= (1 + _NOTED) * (width + 8 / spec.block_size):
        count = f"{length} value{'s' * (length > 1)}"
        reasons.append(f"{count} a block, which has a scale and whole bytes of its own")
    return f"{bits:.4g} bits a value: {', '.join(reasons)}" if reasons else None
