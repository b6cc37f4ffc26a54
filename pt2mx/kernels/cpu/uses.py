"""Tell passes whether this machine's kernels support a use of them, and are faster.

Each function takes the tensor that the kernel computes, of which the shape and the dtype are known, and facts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.kernels.constants import BLOCK, supports_epilogue
from pt2mx.kernels.cpu import attention, bf16_matmul
from pt2mx.kernels.cpu.linear import (
    AMX,
    AVX512_BF16,
    FEW_ROWS,
    INT8,
    VECTOR_ROWS,
    VPDPBUSD,
    integer_isa_for,
    isa_for,
)
from pt2mx.kernels.cpu.quantize import TABLE, decoder_of
from pt2mx.spec import MXSpec

#: fewest multiplications for which a matmul of activations is faster, despite a call's overhead of 25 us
MIN_MULTIPLIES = 1 << 21
#: fewest rows, K and N from which integers are faster than a decoded weight in float32: of codes whose sums of products
#: fit 16 bits, or with VPDPBUSD; of other codes (tests/benchmarks/README.md)
_LEAST_SIZES = (FEW_ROWS + 1, 96, 96), (512, 256, 256)
#: fewest multiplications per output value for which a convolution of few channels is faster. Time relative to oneDNN
#: (tests/benchmarks/convolutions.py): 0.76 with 75 multiplications; with 27 and 48, 0.84 in reused memory and 0.95 to
#: 1.3 in fresh pages
_MIN_REDUCTION = 64


def multiplies_packed(y: Tensor, weight: MXSpec, k: int) -> bool:
    """Return whether matrix instructions multiply many rows of k bfloat16 values by a packed weight."""
    return bool(isa_for(weight, k))


def multiplies_in_bfloat16(y: Tensor, x: MXSpec | None, weight: MXSpec, rows: int | None, k: int) -> bool:
    """Return whether x times a weight, (rows, k) times (n, k), is faster with x in bfloat16 than in y's dtype.

    Args:
        y: the result, (..., n).
        x: how x is quantized.
        weight: how the weight is quantized.
        rows: None for an unknown number.
        k: values of a row.
    """
    both_integers = are_integers(k, x, weight)
    if rows is not None and rows <= (VECTOR_ROWS if both_integers else FEW_ROWS):
        return False
    isa = isa_for(weight, k)
    is_supported = decoder_of(weight, k)[0] != TABLE and (both_integers or isa != INT8)
    if y.dtype == torch.bfloat16:  # takes as long as the dense matmul, which needs a decoded weight
        return both_integers or (is_supported and isa & (AMX | AVX512_BF16) == AVX512_BF16)
    if x is not None and isa == INT8 and not integers_are_faster(x, weight, rows, k, y.shape[-1]):
        return False
    return y.dtype == torch.float32 and is_supported


def are_integers(k: int, *specs: MXSpec | None) -> bool:
    """Return whether this machine multiplies many rows of k values of these specs as integers. AMX is faster."""
    return all(isa_for(spec, k) & (AMX | INT8) == INT8 for spec in specs if spec)


def integers_are_faster(x: MXSpec, weight: MXSpec, rows: int | None, k: int, n: int) -> bool:
    """Return whether a float32 matmul, x: (rows, K) times a weight (N, K), is faster as integers than with the decoded
    weight; `rows`: None for an unknown number. Few rows have a kernel of their own, which is faster."""
    needs_32_bits = weight.element.bits == 8 and x.element.bits > 4 and not integer_isa_for(weight, k) & VPDPBUSD
    least_rows, least_k, least_n = _LEAST_SIZES[needs_32_bits]
    if rows is not None and rows < least_rows:
        return rows <= FEW_ROWS
    return k >= least_k and n >= least_n


def quantizes_matmul(y: Tensor, quantization: MXSpec, weight: MXSpec, k: int, has_any_values: bool) -> bool:
    """Return whether the kernel that multiplies rows of k bfloat16 values can quantize its result y: (..., n).
    `has_any_values`: whether x may hold others than integers, where the weight is one of integers."""
    rows = [size for size in y.shape[:-1] if isinstance(size, int)]
    if len(rows) == y.dim() - 1 and math.prod(rows) <= FEW_ROWS:
        return False
    isa = isa_for(weight, k)
    if not isa or (isa == INT8 and has_any_values):
        return False
    return supports_epilogue(quantization, y.shape[-1], y.dtype)


def convolves(y: Tensor, x: MXSpec, weight: MXSpec, channels: int, kernel: Sequence[int], is_narrow: bool) -> bool:
    """Return whether matrix instructions compute a convolution. `is_narrow`: for channels that would leave much of a
    group of 32 empty, whose taps along a row are multiplied as one."""
    if is_narrow:
        has_bfloat16 = isa_for(weight, channels) & (AMX | AVX512_BF16)
        return bool(has_bfloat16) and channels < BLOCK and channels * math.prod(map(int, kernel)) >= _MIN_REDUCTION
    isa = isa_for(weight, channels)
    return bool(isa) and (isa != INT8 or are_integers(channels, x, weight))


def multiplies_activations(y: Tensor, sizes: Sequence[object], *_: object) -> bool:
    """Return whether a matmul of activations, or attention, is faster on matrix instructions for bfloat16. `sizes`: of
    all dimensions, also of the one that the matmul reduces."""
    known = [n for n in sizes if isinstance(n, int)]
    small = len(known) == len(sizes) and math.prod(known) < MIN_MULTIPLIES
    return not small and bool(bf16_matmul.bf16_isa())


def attends(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether the kernel of `decoding_attention` supports these sizes."""
    sizes = query.shape[1] // keys.shape[1], query.shape[3], values.shape[3]
    return all(isinstance(size, int) for size in sizes) and attention.supports_dense(*sizes)
