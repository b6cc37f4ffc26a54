"""The device code of `fp8_rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_wait

from pt2mx.kernels.gpu.blocks import factor, power_of_two, rounded, scale_of_amax, with_sign


@triton.jit
def quantize_rows_kernel(
    x, residual, weight, bias, normed, codes, scales, rest, k, rows, eps, C: tl.constexpr, F: tl.constexpr
):
    """x, residual: (rows, k), weight, bias: (k,) -> normed: (rows, k), the norm of x + residual, where F.norm; what
    `fp8_rows.quantize` gives of that, or of an activation of x."""
    row, at, mask = row_offsets(k, rows, F)
    if F.pdl:
        gdc_wait()
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if F.has_residual:
        values += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        values = to_bfloat16(values).to(tl.float32)
    if F.norm:
        values = to_bfloat16(layer_norm(values, weight, bias, mask, k, eps, F))
        tl.store(normed + at, values, mask=mask)
        values = values.to(tl.float32)
    elif F.activation != "none":
        values = to_bfloat16(activated(values, tl.constexpr(F.activation))).to(tl.float32)
        values = tl.where(mask, values, 0.0)
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    scale, finite = scale_of_amax(amax, C)
    top = tl.maximum(tl.max(tl.where(amax > 0, scale, 0), 1), F.shift + 1)
    below = scale - top[:, None]
    fits = tl.min((finite & ((below >= -F.spread) | (amax == 0))).to(tl.int32), 1)
    tl.store(scales + row, tl.where(fits == 1, power_of_two(top - F.shift), -1.0), mask=row < rows)
    folded = rounded_in_row(values, top, tl.maximum(below, -F.spread), C, F)
    tl.store(codes.to(tl.pointer_type(tl.float8e4nv)) + at, folded.to(tl.float8e4nv), mask=mask)
    if tl.min(fits, 0) == 0:
        kept = fake_quantized(values, scale, finite, C, F).to(rest.dtype.element_ty)
        tl.store(rest + at, kept, mask=mask & (fits == 0)[:, None, None])


@triton.jit
def unfit_rows_kernel(scales, rest, weight, weight_scales, bias, out, m, n, k, F: tl.constexpr):
    """The products of the rows of rest whose scale says that they did not fit: rest: (m, k) bfloat16, weight: (n, k)
    codes, weight_scales, bias: (n,) -> out: (m, n). Each program has some columns, and nothing to do most times."""
    if F.pdl:
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
                    a = tl.load(rest + a_at, mask=unfit[:, None] & (step < k)[None, :], other=0.0)
                    b_at = column[None, :].to(tl.int64) * k + step[:, None]
                    b_mask = (column < n)[None, :] & (step < k)[:, None]
                    b = tl.load(weight.to(tl.pointer_type(tl.float8e4nv)) + b_at, mask=b_mask, other=0.0)
                    sums = tl.dot(a, b.to(a.dtype), sums)
                sums *= factors[None, :]
                if F.has_bias:
                    sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
                place = row[:, None].to(tl.int64) * n + column[None, :]
                tl.store(out + place, sums.to(out.dtype.element_ty), mask=unfit[:, None] & (column < n)[None, :])


@triton.jit
def row_offsets(k, rows, F: tl.constexpr):
    """Rows of a program, and the offsets and the mask of their values, (rows, blocks, 32)."""
    row = tl.program_id(0) * F.rows + tl.arange(0, F.rows)
    column = tl.arange(0, F.blocks)[:, None] * 32 + tl.arange(0, 32)[None, :]
    at = row[:, None, None].to(tl.int64) * k + column[None, :, :]
    return row, at, (row < rows)[:, None, None] & (column < k)[None, :, :]


@triton.jit
def rounded_in_row(values, top, below, C: tl.constexpr, F: tl.constexpr):
    """values: (rows, blocks, 32) fp32, top: (rows) the largest scale of a row, below: (rows, blocks) what the scale of
    a block is above it -> the rounded values in units of 2**-shift of that scale, saturated.

    Adding 1.5 * 2**23 quanta rounds to a whole number of them, ties to even, for either sign; the sign of a zero, which
    no product sees, is lost.
    """
    v = values * power_of_two(254 + F.shift - top)[:, None, None]
    binade = v.to(tl.int32, bitcast=True) & 0x7F800000
    binade = tl.maximum(binade, ((127 + C.emin + F.shift + below) << 23)[:, :, None])
    many = (binade + ((23 - C.mantissa_bits << 23) + 0x400000)).to(tl.float32, bitcast=True)
    most = (C.max_normal * power_of_two(127 + F.shift + below))[:, :, None]
    return tl.minimum(tl.maximum((v + many) - many, -most), most)


@triton.jit
def fake_quantized(values, scale, finite, C: tl.constexpr, F: tl.constexpr):
    """values: (rows, blocks, 32) fp32, scale, finite: (rows, blocks) -> the same quantized and dequantized."""
    LINES: tl.constexpr = F.rows * F.blocks
    scale, finite = tl.reshape(scale, [LINES]), tl.reshape(finite.to(tl.int32), [LINES]) == 1
    v, p = rounded(tl.reshape(values, [LINES, 32]), scale, finite, None, None, C)
    return tl.reshape(with_sign(p, v, C) * factor(scale, finite, C), [F.rows, F.blocks, 32])


@triton.jit
def layer_norm(values, weight, bias, mask, k, eps, F: tl.constexpr):
    mean = tl.sum(tl.sum(values, 2), 1) / k
    centred = tl.where(mask, values - mean[:, None, None], 0.0)
    variance = tl.sum(tl.sum(centred * centred, 2), 1) / k
    centred *= (1.0 / tl.sqrt(variance + eps))[:, None, None]
    column = tl.arange(0, F.blocks)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if F.has_weight:
        centred *= tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)[None, :, :]
    if F.has_bias:
        centred += tl.load(bias + column, mask=column < k, other=0.0).to(tl.float32)[None, :, :]
    return tl.where(mask, centred, 0.0)


@triton.jit
def one_plus_erf(x):
    """1 + erf(x), within 5e-7, by half the instructions of libdevice's: x P(x**2) / Q(x**2), fitted to the least
    largest error up to 3.92. Of all bfloat16 numbers GELU rounds 226 otherwise than exactly, torch's 848."""
    z = tl.minimum(x, 3.92)
    s = z * z
    p = -1.4364269e-06 * s + 2.5259689e-04
    p = p * s + 1.0088231e-02
    p = p * s + 7.2254471e-02
    p = p * s + 3.6164454e-01
    p = p * s + 1.1283821
    q = 2.3566321e-03 * s + 2.7986746e-02
    q = q * s + 1.8197754e-01
    q = q * s + 6.5384561e-01
    q = q * s + 1.0
    inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [q], tl.float32, True, 1)
    return tl.where(x > -3.92, 1.0 + z * p * inverse, 0.0)


@triton.jit
def to_bfloat16(values):
    """Two values an instruction; one takes eight times as long as an addition."""
    cast: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(cast, "=r,r,r", [values], tl.bfloat16, True, 2)


@triton.jit
def activated(x, NAME: tl.constexpr):
    if NAME == "gelu":
        y = 0.5 * x * one_plus_erf(x * 0.7071067811865476)
    elif NAME == "gelu_tanh":
        y = 0.5 * x * (1.0 + libdevice.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif NAME == "silu":
        y = x / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(NAME == "relu")
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y
