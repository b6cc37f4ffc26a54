"""The table of scale formats: every number that an algorithm needs to know of a block's scale is a field of a row here.

Sources: E8M0 is OCP Microscaling Formats (MX) v1.0, section 5.4.1; E4M3 and E5M3 without a sign are `ue4m3` and `ue5m3`
of NVIDIA's PTX ISA; E4M3 with a float32 scale a tensor is NVFP4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pt2mx.errors import MXError, nearest
from pt2mx.formats import ELEMENTS, ElementFormat


@dataclass(frozen=True)
class ScaleFormat:
    """One scale format. `pt2mx.SCALE_FORMATS` holds every scale format; `parse_scale_format` finds one.

    Scales are positive, and the next code is the next larger scale. Only E8M0 has no significand: its scales are powers
    of two, which move a value's exponent without rounding the value.

    Args:
        name: the canonical name, as specs and files contain it.
        grid: the float whose non-negative values are the scales; its `max_normal` is the largest scale.
        dtype: the dtype of stored scales: uint8, or a float.
        nan: the code of NaN, the scale of a block with an Inf or a NaN.
        tensor: the float32 scale of the whole tensor: `""` for none; `"factor"`: a value is its code times
            `scale * tensor_scale`; `"divisor"`: times `scale / tensor_scale`.
        scale_mode: the default scale mode.

    Example:
        >>> import pt2mx
        >>> e4m3 = pt2mx.SCALE_FORMATS["e4m3_f32"]
        >>> e4m3.max_value, e4m3.min_value == 2.0**-9, e4m3.tensor, e4m3.dtype
        (448.0, True, 'factor', torch.uint8)
    """

    name: str
    grid: ElementFormat
    dtype: torch.dtype
    nan: int
    tensor: str = ""
    scale_mode: str = "nearest"

    @property
    def bits(self) -> int:
        """The bits of a stored scale."""
        return 8 * self.dtype.itemsize

    @property
    def is_power_of_two(self) -> bool:
        """True for a scale without a significand."""
        return self.grid.mantissa_bits == 0

    @property
    def max_value(self) -> float:
        """The largest scale."""
        return self.grid.max_normal

    @property
    def min_value(self) -> float:
        """The smallest scale that quantization gives: the smallest code, or a float32 that is no subnormal."""
        smallest = 2.0 ** (self.grid.emin - self.grid.mantissa_bits)
        return smallest if self.is_power_of_two else max(smallest, 2.0**-126)

    def is_nan(self, stored: torch.Tensor) -> torch.Tensor:
        """Return where stored scales are NaN. A code of E4M3 has a sign bit, which files of others may set.

        Args:
            stored: of any shape, in the dtype of this format.

        Returns:
            A tensor of that shape, bool.
        """
        if self.dtype.is_floating_point:
            return stored.isnan()
        return (stored & (1 << self.grid.bits - 1) - 1) == self.nan

    def __str__(self) -> str:
        return self.name


def _float(dtype: torch.dtype, name: str, exponent_bits: int, mantissa_bits: int, nan: int) -> ScaleFormat:
    """Return the format whose scales are floats of that dtype."""
    bias = 2 ** (exponent_bits - 1) - 1
    most = torch.finfo(dtype).max
    grid = ElementFormat(name, exponent_bits, mantissa_bits, bias, bias, most, has_inf=True, has_nan=True)
    return ScaleFormat(name, grid, dtype, nan)


# 9 bits, since an element counts a sign, which these scales lack
_E8M0 = ElementFormat("fp9_e8m0", 8, 0, 128, 127, 2.0**127, has_nan=True)
_E5M3 = ElementFormat("fp9_e5m3", 5, 3, 15, 16, 114688.0, has_nan=True)
_E4M3 = ELEMENTS["fp8_e4m3"]

_TABLE = (
    #           name, grid, dtype of stored scales, code of NaN
    ScaleFormat("e8m0", _E8M0, torch.uint8, 0xFF, scale_mode="floor"),
    ScaleFormat("e4m3", _E4M3, torch.uint8, 0x7F),
    # NVFP4's scale
    ScaleFormat("e4m3_f32", _E4M3, torch.uint8, 0x7F, "factor"),
    # the same, with the reciprocal of the tensor's scale: `weight_global_scale` of compressed-tensors
    ScaleFormat("e4m3_f32_divisor", _E4M3, torch.uint8, 0x7F, "divisor"),
    ScaleFormat("e5m3", _E5M3, torch.uint8, 0xFF),
    _float(torch.float32, "f32", 8, 23, 0x7FC00000),
    _float(torch.bfloat16, "bf16", 8, 7, 0x7FC0),
    _float(torch.float16, "f16", 5, 10, 0x7E00),
)

#: The least and the largest scale of a tensor. They leave room for a block's scale in float32: the product of both, its
#: reciprocal, and a quotient. Quantizing with a scale beyond them gives NaN.
TENSOR_SCALE_RANGE = 2.0**-120, 2.0**120

#: Every scale format, by canonical name.
SCALE_FORMATS: dict[str, ScaleFormat] = {f.name: f for f in _TABLE}

_OTHER_NAMES = {
    "ue8m0": "e8m0",
    "ue4m3": "e4m3",
    "ue5m3": "e5m3",
    "float8_e8m0fnu": "e8m0",
    "float8_e4m3fn": "e4m3",
    **{name: f.name for f in _TABLE if f.dtype.is_floating_point for name in (str(f.dtype).removeprefix("torch."),)},
    "fp32": "f32",
    "fp16": "f16",
}


def parse_scale_format(spelling: object) -> ScaleFormat:
    """Return the scale format that a spelling names.

    Args:
        spelling: a `ScaleFormat`; its name in upper or lower case (`"e8m0"`, `"e4m3"`, `"e4m3_f32"`, `"bf16"`, ...),
            PTX's name (`"ue4m3"`), or a torch dtype or its name (`torch.float8_e4m3fn`, `"float32"`).

    Returns:
        The row of `pt2mx.SCALE_FORMATS`, or the `ScaleFormat` that was given.

    Raises:
        MXError: for anything else, naming the nearest valid spelling.

    Example:
        >>> import torch, pt2mx
        >>> pt2mx.parse_scale_format("UE4M3").name, pt2mx.parse_scale_format(torch.bfloat16).name
        ('e4m3', 'bf16')
    """
    if isinstance(spelling, ScaleFormat):
        return spelling
    if not is_scale_format(spelling):
        raise MXError(f"unknown scale format {spelling!r}: {nearest(spelling, SCALE_FORMATS)}")
    return SCALE_FORMATS[_canonical_name(spelling)]


def is_scale_format(spelling: object) -> bool:
    """Return whether `parse_scale_format` takes a spelling."""
    return isinstance(spelling, ScaleFormat) or _canonical_name(spelling) in SCALE_FORMATS


def _canonical_name(spelling: object) -> str:
    text = str(spelling).strip().lower().removeprefix("torch.")
    return _OTHER_NAMES.get(text, text)
