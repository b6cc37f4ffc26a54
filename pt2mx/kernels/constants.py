"""What kernels in C++ and in Triton take: the numbers of a spec, and the sizes and specs that they support."""

from __future__ import annotations

from typing import Any

import torch

from pt2mx.formats import ElementFormat
from pt2mx.kernels.reference import squared_error_bits
from pt2mx.modes import SCALE_MODES, ScaleMode
from pt2mx.spec import MXSpec

#: values of a block, where a kernel quantizes what it computes, and of FP8 rows
BLOCK = 32
#: rows of x, or queries, from which `matmul_bfloat16` and `attention_bfloat16` are faster than torch's operators
LEAST_ROWS = 16
#: type of device -> the widest head that its kernel of `attention_bfloat16` takes: a score is one sum
WIDEST = {"cpu": 512, "cuda": 128}
#: values of a row that a program on a GPU keeps
_LONGEST_ROW = 1 << 15

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


def supports_epilogue(quantization: MXSpec, n: object, product_dtype: torch.dtype | None) -> bool:
    """True if kernels quantize their results, rows of n values rounded to a dtype, before they store them: the kernel
    finishes one block at a time."""
    element, mode = quantization.element, SCALE_MODES[quantization.scale_mode]
    whole = isinstance(n, int) and n % BLOCK == 0 and min(quantization.block_size, n) == BLOCK
    blockwise = quantization.rounding == "even" and not mode.searches and not element.is_wide
    return whole and blockwise and product_dtype in (torch.float32, torch.bfloat16)


def supports_bf16x2(spec: MXSpec, length: object, *dtypes: torch.dtype) -> bool:
    """True if the GPU's kernels quantize activations and norms of `length` values a row, two bfloat16 an instruction,
    where all that they read is in `dtypes`."""
    element, mode = spec.element, SCALE_MODES[spec.scale_mode]
    whole = isinstance(length, int) and length % BLOCK == 0 and length <= _LONGEST_ROW and spec.block_size == BLOCK
    in_pairs = element.mantissa_bits <= 6 and element.lowest == -element.max_normal and not element.is_wide
    return whole and in_pairs and spec.rounding == "even" and not mode.searches and set(dtypes) == {torch.bfloat16}
