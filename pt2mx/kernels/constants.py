"""The numbers of a spec that the C++ and Triton kernels receive, and the sizes and specs that they support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx.kernels.float_scales import code_range
from pt2mx.kernels.scale_search import squared_error_bits
from pt2mx.modes import FLOAT_SCALE_MODES, SCALE_MODES
from pt2mx.spec import MXSpec

#: values of a block that a kernel quantizes as it computes it, and of a block of FP8 rows
BLOCK = 32
#: fewest rows of x, or queries, for which `matmul_bfloat16` and `attention_bfloat16` are faster than torch's operators
LEAST_ROWS = 16
#: type of device -> the widest head that its `attention_bfloat16` kernel supports, since it sums each score at once
WIDEST = {"cpu": 512, "cuda": 128}
#: most values of a row that a GPU program can keep
_LONGEST_ROW = 1 << 15

_OF_ELEMENT = (
    *("bits", "mantissa_bits", "bias", "emin", "emax", "max_code", "max_normal", "lowest"),
    *("has_inf", "has_nan", "is_int", "full_range"),
)


def spec_constants(spec: MXSpec) -> dict[str, Any]:
    """Return name -> number: the fields of the element, and of the scale mode for this element and block size; for
    scales with a significand, those of "floor".

    `threshold`: if the fp32 mantissa of a block's largest magnitude is above this, the exponent of the block's scale is
    one larger. `exponent_offsets`: the candidates of a mode that searches, as offsets to that exponent. `error_bits`:
    bits of an error, as the search measures it.
    """
    element, mode = spec.element, SCALE_MODES[spec.scale_mode if spec.has_power_of_two_scale else "floor"]
    return {
        **{name: getattr(element, name) for name in _OF_ELEMENT},
        "threshold": mode.threshold(element),
        "exponent_offsets": mode.exponent_offsets,
        "searches": spec.searches,
        "error_bits": squared_error_bits(spec.block_size),
    }


def float_scale_constants(spec: MXSpec) -> dict[str, Any]:
    """Return name -> number for scales with a significand: the fields of the format and of the mode for this element
    (`FloatScaleMode`).

    `most`, `unit`: the largest value of the element in units of its unit, and the unit. `smallest`, `largest`: the
    codes of the smallest and largest scale that quantization gives. `magnitude`, `sign`: masks of these bits of a code.
    """
    element, scale, mode = spec.element, spec.scale_format, FLOAT_SCALE_MODES[spec.scale_mode]
    sign, (smallest, largest) = 1 << (scale.grid.bits - 1), code_range(spec)
    return {
        **{name: getattr(scale.grid, name) for name in ("bits", "mantissa_bits", "bias", "emin", "max_code")},
        **{name: getattr(scale, name) for name in ("dtype", "nan", "tensor", "max_value")},
        **{"smallest": smallest, "largest": largest, "magnitude": sign - 1, "sign": sign},
        **{"unit": element.unit, "most": element.max_normal / element.unit},
        **{name: getattr(mode, name)(scale) for name in ("least", "zero_below", "zero")},
        **{"factors": mode.factors(element), "code_offsets": mode.code_offsets},
        **{"reciprocal": mode.reciprocal, "rounds_up": mode.rounds_up},
    }


def supports_epilogue(quantization: MXSpec, n: object, product_dtype: torch.dtype | None) -> bool:
    """Return whether kernels can quantize rows of n values, rounded to a dtype, before they store them: they finish one
    block at a time."""
    if not quantization.has_plain_scale:
        return False
    whole = isinstance(n, int) and n % BLOCK == 0 and min(quantization.block_size, n) == BLOCK
    blockwise = quantization.rounding == "even" and not quantization.searches and quantization.has_kernels
    return whole and blockwise and product_dtype in (torch.float32, torch.bfloat16)


def quantizes_attention(y: Tensor, quantization: MXSpec) -> bool:
    """Return whether kernels of attention can quantize its result (B, heads, S, W)."""
    width = y.shape[-1]
    return isinstance(width, int) and width <= WIDEST[y.device.type] and supports_epilogue(quantization, width, y.dtype)


def supports_bf16x2(spec: MXSpec, length: object, *dtypes: torch.dtype) -> bool:
    """Return whether GPU kernels support fused quantization of activations and norms, two bfloat16 values per
    instruction, for rows of `length` values and inputs of `dtypes`."""
    if not spec.has_plain_scale:
        return False
    element = spec.element
    whole = isinstance(length, int) and length % BLOCK == 0 and length <= _LONGEST_ROW and spec.block_size == BLOCK
    in_pairs = element.mantissa_bits <= 6 and element.lowest == -element.max_normal and spec.has_kernels
    return whole and in_pairs and spec.rounding == "even" and not spec.searches and set(dtypes) == {torch.bfloat16}
