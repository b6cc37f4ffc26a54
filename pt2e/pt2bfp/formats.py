"""`_quantize_bfp` and the numbers of a format, as pt2-bfp's Triton kernels have them."""

from __future__ import annotations

from torch import Tensor

from pt2mx.errors import MXError, check_integer, nearest
from pt2mx.functional import fake_quantize_mx
from pt2mx.ops.checks import check_tensors
from pt2mx.spec import parse

#: names and letters of pt2-bfp's roundings -> pt2mx's
_ROUNDINGS = {"nearest": "even", "up": "up", "down": "down", "stochastic": "stochastic"}
_ROUNDINGS |= {name[0].upper(): rounding for name, rounding in _ROUNDINGS.items()}


def _quantize_bfp(
    A: Tensor,
    scale_bits: int,
    elem_format: object,
    axes: int | list[int] | None = None,
    block_size: int = 1024,
    round: str = "stochastic",
    symmetric: bool = True,
    format_str: str = "",
    custom_cuda: bool = False,
) -> Tensor:
    """Return A, (..., n, ...), quantized to a block format and dequantized, after pt2-bfp's `_quantize_bfp`.

    Blocks of `block_size` values, 0 for all, run along one axis. `scale_bits` are bits of the scale's exponent, 8 and
    more float32's. `round` is "nearest" (half to even), "up", "down", "stochastic", or the first letter as a capital.
    If `symmetric`, integers exclude the lowest code. `format_str` and `custom_cuda` choose a kernel in pt2-bfp, and
    change nothing.

    Raises:
        MXError: for another A, no axis or several axes, another rounding or number of bits.
    """
    if elem_format is None:
        return A
    check_tensors(A=A)
    axis, *others = axes if isinstance(axes, list | tuple) and axes else [axes]
    if others or type(axis) is not int or not -A.dim() <= axis < A.dim():
        raise MXError(f"axes={axes!r} must be one axis of A along which blocks run, for example [-1]")
    check_integer("scale_bits", scale_bits, 1)
    if not isinstance(round, str) or round not in _ROUNDINGS:
        raise MXError(f"unknown rounding {round!r}: {nearest(round, _ROUNDINGS)}")
    spec = parse(elem_format)
    if spec.element.is_int:
        name = spec.element.name.removesuffix("_full")
        spec = spec.replace(element=name if symmetric else f"{name}_full")
    return fake_quantize_mx(
        A,
        spec.replace(
            axis=axis,
            block_size=block_size or max(A.shape[axis], 1),
            rounding=_ROUNDINGS[round],
            scale_exp_bits=min(scale_bits, 8),
        ),
    )


def max_norm(format: object) -> float:
    """Return the largest number of a format's element, in units of a block's scale."""
    return parse(format).element.max_normal


def min_norm(format: object) -> float:
    """Return the smallest normal number of a format's element, in units of a block's scale; 0 for integers, as in
    microxcaling and pt2-bfp."""
    element = parse(format).element
    return 0.0 if element.is_int else 2.0**element.emin


def _get_format_params(fmt: object) -> tuple[int, int, int, float, float]:
    """Return the exponent bits of a format's element (0 for integers), its mantissa bits with sign and hidden bit, the
    exponent of its largest number, `max_norm` and `min_norm`, after pt2-bfp's and microxcaling's function."""
    element = parse(fmt).element
    bits = (0, element.bits) if element.is_int else (element.exponent_bits, element.mantissa_bits + 2)
    return *bits, element.emax, max_norm(fmt), min_norm(fmt)
