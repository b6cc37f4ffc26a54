"""The device code of `fp8_rowwise`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pt2mx.kernels.gpu.activations_kernel import fake_quantized, floats_of, load_pairs, pair_offsets
from pt2mx.kernels.gpu.bf16x2 import (
    amax_of_pairs,
    fused_multiply_add,
    magnitudes_of_pair,
    odd_bytes,
    pairs_round,
    round_to_pair,
)
from pt2mx.kernels.gpu.blocks import power_of_two, scale_of_amax

_TWICE = tl.constexpr(0x00010001)
_MINUS_ZEROS = tl.constexpr(0x80008000 - (1 << 32))
#: the exponent of the factor that gives a bfloat16 the exponent field of E4M3
_TO_E4M3 = tl.constexpr(7 - 127)


@triton.jit
def quantize_rows_kernel(x, norm, codes, scales, unfit_values, k, rows, C: tl.constexpr, F: tl.constexpr):
    """x: (rows, k) -> the results of `fp8_rowwise.quantize` for the activation of x, or for the layer norm if
    F.norm."""
    row, column, at, mask = pair_offsets(k, rows, F)
    pairs = load_pairs(x, norm, at, mask, column, k, F)
    amax = amax_of_pairs(pairs, 2)
    scale, finite = scale_of_amax(amax, C)
    top = tl.maximum(tl.max(tl.where(amax > 0, scale, 0), 1), F.shift + 1)
    fits = finite & (scale >= top[:, None] - F.spread) | (amax == 0)
    in_pairs = pairs_round(scale, C) & (top + _TO_E4M3 <= 13 + F.shift)[:, None] | (amax == 0)
    ways = tl.min(tl.where(fits, tl.where(in_pairs, 2, 1), 0), 1)
    tl.store(scales + row, tl.where(ways > 0, power_of_two(top - F.shift), -1.0), mask=row < rows)
    if tl.min(ways, 0) == 2:
        magnitudes = magnitudes_of_pair(pairs, tl.where(amax > 0, scale, 127)[:, :, None], C)
        unit = ((127 + F.shift + 127 + _TO_E4M3 - top) << 7) * _TWICE
        magnitudes = fused_multiply_add(magnitudes, unit[:, None, None], _MINUS_ZEROS)
        m0, m1 = tl.split(tl.reshape(magnitudes << 4, [F.rows, F.blocks, 8, 2]))
        v0, v1 = tl.split(tl.reshape(pairs, [F.rows, F.blocks, 8, 2]))
        words = (odd_bytes(m0, m1) & 0x7F7F7F7F) | (odd_bytes(v0, v1) & ~0x7F7F7F7F)
        word = tl.arange(0, F.blocks)[:, None] * 8 + tl.arange(0, 8)[None, :]
        offs = row[:, None, None].to(tl.int64) * (k // 4) + word[None, :, :]
        # a thread has two adjacent codes; to store four at once, threads would have to exchange words
        offs = tl.multiple_of(offs, [1, 1, 2])
        tl.store(codes.to(tl.pointer_type(tl.int32)) + offs, words, mask=mask)
    else:
        low, high = floats_of(pairs)
        low, high = fake_quantized(low, scale, finite, C, F), fake_quantized(high, scale, finite, C, F)
        fit = (ways > 0)[:, None, None]
        factor = power_of_two(254 + F.shift - top)[:, None, None]
        even = codes.to(tl.pointer_type(tl.float8e4nv)) + 2 * at
        tl.store(even, tl.where(fit, low * factor, 0.0).to(tl.float8e4nv), mask=mask)
        tl.store(even + 1, tl.where(fit, high * factor, 0.0).to(tl.float8e4nv), mask=mask)
        tl.store(unfit_values.to(tl.pointer_type(tl.int32)) + at, round_to_pair(low, high), mask=mask & (fit == 0))


@triton.jit
def unfit_rows_kernel(scales, unfit_values, weight, weight_scales, bias, out, m, n, k, F: tl.constexpr):
    """Multiply the rows that did not fit, whose scales are negative. unfit_values: (m, k) bfloat16, weight: (n, k)
    codes, weight_scales, bias: (n,) -> out: (m, n). Each program computes some columns, and usually has nothing to
    do."""
    if F.pdl:
        gdc_launch_dependents()  # usually there is nothing to do, and dependents wait for this kernel's end anyway
        gdc_wait()
    least = tl.full([F.scanned], 1.0, tl.float32)
    for start in range(0, m, F.scanned):
        at = start + tl.arange(0, F.scanned)
        least = tl.minimum(least, tl.load(scales + at, mask=at < m, other=1.0))
    if tl.min(least, 0) < 0:
        column = tl.program_id(0) * F.columns + tl.arange(0, F.columns)
        factors = tl.load(weight_scales + column, mask=column < n, other=0.0)
        for start in range(0, m, F.rows):
            row = start + tl.arange(0, F.rows)
            unfit = tl.load(scales + row, mask=row < m, other=1.0) < 0
            if tl.max(unfit.to(tl.int32), 0) == 1:
                sums = tl.full([F.rows, F.columns], 0.0, tl.float32)
                for first in range(0, k, F.depth):
                    step = first + tl.arange(0, F.depth)
                    a_at = row[:, None].to(tl.int64) * k + step[None, :]
                    a = tl.load(unfit_values + a_at, mask=unfit[:, None] & (step < k)[None, :], other=0.0)
                    b_at = column[None, :].to(tl.int64) * k + step[:, None]
                    b_mask = (column < n)[None, :] & (step < k)[:, None]
                    b = tl.load(weight.to(tl.pointer_type(tl.float8e4nv)) + b_at, mask=b_mask, other=0.0)
                    sums = tl.dot(a, b.to(a.dtype), sums)
                sums *= factors[None, :]
                if F.has_bias:
                    sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
                out_offs = row[:, None].to(tl.int64) * n + column[None, :]
                tl.store(out + out_offs, sums.to(out.dtype.element_ty), mask=unfit[:, None] & (column < n)[None, :])
