"""The device code of `activations`: bfloat16 values in pairs (`bf16x2`), their activations and norms in fp32."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_wait

from pt2mx.kernels.gpu.bf16x2 import (
    amax_of_pairs,
    fused_multiply_add,
    magnitudes_of_pair,
    pairs_round,
    round_to_pair,
)
from pt2mx.kernels.gpu.blocks import factor, rounded, scale_of_amax, with_sign

_SIGNS = tl.constexpr(0x80008000 - (1 << 32))
_ONES = tl.constexpr(0x3F803F80)


class Norm(NamedTuple):
    """The tensors of a layer norm, (rows, k) and (k,), or None; `residual` is added to x first."""

    out: Any = None
    residual: Any = None
    weight: Any = None
    bias: Any = None
    eps: float = 0.0


@triton.jit
def fake_quantize_activation_kernel(x, norm, out, k, rows, C: tl.constexpr, F: tl.constexpr):
    """x: (rows, k) -> out: (rows, k), the activation of x, or the layer norm if F.norm, quantized and dequantized."""
    _row, column, at, mask = pair_offsets(k, rows, F)
    pairs = load_pairs(x, norm, at, mask, column, k, F)
    amax = amax_of_pairs(pairs, 2)
    scale, finite = scale_of_amax(amax, C)
    plain = (finite & pairs_round(scale, C)) | (amax == 0)
    out = out.to(tl.pointer_type(tl.int32)) + at
    if tl.min(tl.min(plain.to(tl.int32), 1), 0) == 1:
        quantized = magnitudes_of_pair(pairs, tl.where(amax > 0, scale, 127)[:, :, None], C) | (pairs & _SIGNS)
        if C.is_int:  # two's complement has no negative zero; adding +0 removes it
            quantized = fused_multiply_add(quantized, _ONES, tl.full([], 0, tl.int32))
        tl.store(out, quantized, mask=mask)
    else:
        low, high = floats_of(pairs)
        low, high = fake_quantized(low, scale, finite, C, F), fake_quantized(high, scale, finite, C, F)
        tl.store(out, round_to_pair(low, high), mask=mask)


@triton.jit
def pair_offsets(k, rows, F: tl.constexpr):
    """Return the rows of a program, and of their pairs (rows, blocks, 16) the columns, the offsets in memory, and which
    exist."""
    row = tl.program_id(0) * F.rows + tl.arange(0, F.rows)
    block = tl.arange(0, F.blocks)[:, None]
    column = block * 16 + tl.arange(0, 16)[None, :]
    at = row[:, None, None].to(tl.int64) * (k // 2) + column[None, :, :]
    mask = (row < rows)[:, None, None]
    if not F.whole:
        mask = mask & (block * 32 < k)[None, :, :]
    return row, column, at, mask


@triton.jit
def fake_quantized(values, scale, finite, C: tl.constexpr, F: tl.constexpr):
    """values: (rows, blocks, 16) fp32, scale, finite: (rows, blocks) -> the same quantized and dequantized."""
    LINES: tl.constexpr = F.rows * F.blocks
    scale, finite = tl.reshape(scale, [LINES]), tl.reshape(finite.to(tl.int32), [LINES]) == 1
    v, p = rounded(tl.reshape(values, [LINES, 16]), scale, finite, None, None, C)
    return tl.reshape(with_sign(p, v, C) * factor(scale, finite, C), [F.rows, F.blocks, 16])


@triton.jit
def load_pairs(x, norm, at, mask, column, k, F: tl.constexpr):
    """Load the pairs `at` of x, (rows, blocks, 16), and return their activation, or the layer norm of x +
    norm.residual, which it also stores in norm.out. `column`: positions in a row; k: values of a row."""
    if F.pdl:
        gdc_wait()
    pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    if F.norm:
        low, high = floats_of(pairs)
        if F.has_residual:
            residual = tl.load(norm.residual.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
            more_low, more_high = floats_of(residual)
            low, high = floats_of(round_to_pair(low + more_low, high + more_high))
        low, high = layer_norm(low, high, norm, mask, column, k, F)
        pairs = tl.where(mask, round_to_pair(low, high), 0)
        tl.store(norm.out.to(tl.pointer_type(tl.int32)) + at, pairs, mask=mask)
    elif F.activation != "none":
        low, high = floats_of(pairs)
        pairs = round_to_pair(activated(low, tl.constexpr(F.activation)), activated(high, tl.constexpr(F.activation)))
    return pairs


@triton.jit
def floats_of(pairs):
    """pairs -> the first and the second of each in fp32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def layer_norm(low, high, norm, mask, column, k, F: tl.constexpr):
    """low, high: (rows, blocks, 16) -> the same, normalized along a row."""
    mean = (tl.sum(tl.sum(low + high, 2), 1) / k)[:, None, None]
    low, high = low - mean, high - mean
    if not F.whole:
        low, high = tl.where(mask, low, 0.0), tl.where(mask, high, 0.0)
    variance = tl.sum(tl.sum(low * low + high * high, 2), 1) / k
    factor = (1.0 / tl.sqrt(variance + norm.eps))[:, None, None]
    low, high = low * factor, high * factor
    if F.has_weight:
        first, second = floats_of(of_columns(norm.weight, column, k))
        low, high = low * first, high * second
    if F.has_bias:
        first, second = floats_of(of_columns(norm.bias, column, k))
        low, high = low + first, high + second
    return low, high


@triton.jit
def of_columns(values, column, k):
    """values: (k,) -> their pairs at `column`, (1, blocks, 16)."""
    return tl.load(values.to(tl.pointer_type(tl.int32)) + column, mask=2 * column < k, other=0)[None, :, :]


@triton.jit
def activated(x, NAME: tl.constexpr):
    if NAME == "gelu":
        y = gelu(x)
    elif NAME == "gelu_tanh":
        y = 0.5 * x * (1.0 + libdevice.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif NAME == "silu":
        y = x * reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))
    else:
        tl.static_assert(NAME == "relu")
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y


@triton.jit
def gelu(x):
    """max(x, 0) - |x| P(1 / (1 + c |x|)) exp(-x**2 / 2), the subtracted term with a relative error of 1.1e-5. P is a
    minimax fit of Mills' ratio, by relative error. This takes half the instructions of libdevice's erf. Of all bfloat16
    numbers it rounds 133 incorrectly; 1 + erf(x / sqrt(2)) in fp32 rounds 848 incorrectly. The result of an infinity is
    NaN."""
    magnitude = tl.abs(x)
    t = reciprocal(0.36 * magnitude + 1.0)
    p = -0.09927998 * t + 0.25640798
    p = p * t + 0.03311184
    p = p * t + 0.16962180
    p = p * t + 0.13992603
    p = p * t + 2.0693503e-04
    p *= tl.exp2(x * -0.72134752 * x)
    return tl.maximum(x, 0.0) - magnitude * p


@triton.jit
def reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
