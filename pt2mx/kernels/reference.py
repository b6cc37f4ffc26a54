"""The definition of MX quantization, in plain torch operations that Inductor can trace.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 6.3; the steps follow the design page.
Everything is computed in fp32 on bit patterns: a floating-point log2 is wrong one ulp below a power of two, so that one
bf16 block in 150 would get another exponent. All constants of a format come from `pt2mx.formats` and `pt2mx.modes`.
`axis` is non-negative here, and the callers in `pt2mx.ops` check the inputs. `random`: the numbers for stochastic
rounding (`random_bits`), in the shape of x. `prims`: the primitives, by default `pt2mx.kernels.elements`; all
implementations give the same bits.

The random numbers are those of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
A value's number depends only on the seed and its position in the tensor, so every kernel draws the same numbers, in any
order.
"""

import torch
from torch import Tensor

from pt2mx.kernels import elements
from pt2mx.kernels.elements import BIAS, Prims, pow2, times_pow2
from pt2mx.kernels.packing import pack, split_axis, trim_axis, unpack
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.spec import MXSpec

_MANTISSA = 0x7FFFFF
_INF = 0x7F800000
_SIGN = -0x80000000
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def quantize(x: Tensor, spec: MXSpec, random: Tensor | None = None, prims: Prims = elements) -> tuple[Tensor, Tensor]:
    """x: (..., n, ...) fp32, fp16 or bf16 -> scale (..., ceil(n / block), ...) uint8, data (..., bytes, ...) uint8."""
    exponent, finite, values = _quantize_blocks(x, spec, random, prims)
    codes = elements.encode(torch.where(finite, values, 0.0), spec.element)
    codes = prims.from_blocks(codes, spec.axis, x.shape[spec.axis])
    scale = _scale_bytes(exponent, finite, spec, x.shape[spec.axis], prims)
    return scale, pack(codes, spec.axis, spec.element.bits)


def scales(x: Tensor, spec: MXSpec) -> Tensor:
    """x: (..., n, ...) -> the scales that `quantize` gives, (..., ceil(n / block), ...) uint8, without the codes."""
    exponent, finite = shared_exponent(_to_blocks(x.to(torch.float32), spec), spec)
    return _scale_bytes(exponent, finite, spec, x.shape[spec.axis])


def dequantize(
    data: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int, prims: Prims = elements
) -> Tensor:
    """data: (..., bytes, ...) uint8, scale: (..., ceil(length / block), ...) uint8 -> (..., length, ...) `dtype`."""
    codes = trim_axis(unpack(data, spec.axis, spec.element.bits), spec.axis, length)
    blocks = prims.decode(_to_blocks(codes, spec), spec.element)  # (..., blocks, block, ...)
    scale = split_axis(scale.to(torch.int32), spec.axis, 1)  # (..., blocks, 1, ...), padded like the codes
    return prims.from_blocks(prims.times_scales(blocks, scale).to(dtype), spec.axis, length)


def fake_quantize(x: Tensor, spec: MXSpec, random: Tensor | None = None, prims: Prims = elements) -> Tensor:
    """x: (..., n, ...) -> dequantize(quantize(x)) to the bit, in x's dtype."""
    exponent, finite, values = _quantize_blocks(x, spec, random, prims)
    scaled = times_pow2(values, exponent, finite, prims.realize)
    return prims.from_blocks(scaled.to(x.dtype), spec.axis, x.shape[spec.axis])


def clip_gradient(grad: Tensor, x: Tensor, spec: MXSpec, prims: Prims = elements) -> Tensor:
    """grad, x: (..., n, ...) -> grad, zero where x is beyond the largest value of its block's scale."""
    blocks = _to_blocks(x.to(torch.float32), spec)
    exponent, finite = shared_exponent(blocks, spec, prims)
    v = times_pow2(blocks, -exponent, finite, prims.realize)
    saturated = (v > spec.element.max_normal) | (v < spec.element.lowest)
    return grad.masked_fill(prims.from_blocks(saturated, spec.axis, x.shape[spec.axis]), 0.0)


def shared_exponent(blocks: Tensor, spec: MXSpec, prims: Prims = elements) -> tuple[Tensor, Tensor]:
    """blocks: (..., blocks, block, ...) fp32 -> exponent (..., blocks, 1, ...) int32 in the range of the scale, and
    whether the block is finite. Design: numerics, steps 1 to 3.

    The mantissa field of a subnormal fp32 amax counts units of 2**-149, without a hidden bit. Only for a format with
    emax 0 does this matter, where 2**-127 and 2**-126 are different scales: there `(threshold + 2**23) / 2` is the
    threshold in these units.
    """
    # bits of non-negative floats compare like the floats; a compiled amax may return a NaN with its sign bit set
    amax = blocks.abs().amax(spec.axis + 1, keepdim=True).view(torch.int32) & 0x7FFFFFFF
    lowered: int | Tensor = spec.element.emax
    if spec.scale_exp_bits > 8:  # a wider scale also distinguishes the exponents of fp32 subnormals
        subnormal = amax <= _MANTISSA
        amax = torch.where(subnormal, (amax.view(torch.float32) * 2.0**24).view(torch.int32), amax)
        lowered = lowered + 24 * subnormal.to(torch.int32)
    mode = SCALE_MODES[spec.scale_mode]
    threshold = mode.threshold(spec.element)
    mantissa = amax & _MANTISSA
    round_up = torch.where(amax == mantissa, mantissa > (threshold + _MANTISSA + 1) >> 1, mantissa > threshold)
    exponent = (amax >> 23) - BIAS + round_up.to(torch.int32) - lowered
    exponent, finite = _clamp(exponent, spec), amax < _INF
    if mode.searches:
        exponent = _least_squares(blocks, exponent, finite, spec, mode.exponent_offsets, prims)
    return exponent, finite


def squared_error_bits(block_size: int) -> int:
    """Return the bits of an error, as `_least_squares` measures it, for which the sum of a block's squared errors fits
    int64."""
    return min(28, (62 - (block_size - 1).bit_length()) // 2)


def _least_squares(
    blocks: Tensor, exponent: Tensor, finite: Tensor, spec: MXSpec, exponent_offsets: tuple[int, ...], prims: Prims
) -> Tensor:
    """Add each offset to `exponent`, and return the exponent with the smallest sum of squared errors; the first of
    equal ones.

    Errors are whole multiples of 2**(emax + 1 - bits) times the scale `exponent`, so their sum is exact in any order.
    For stochastic rounding the errors of rounding to nearest count, so that a scale does not depend on the seed.
    """
    rounding = "even" if ROUNDINGS[spec.rounding].random else spec.rounding
    bits = squared_error_bits(spec.block_size)
    candidates, totals = [_clamp(exponent + change, spec) for change in exponent_offsets], []
    for candidate in candidates:
        v = _in_units(blocks, candidate, finite, rounding, prims)
        rounded = prims.round_to_element(v, spec.element, rounding)
        error = (v - rounded).abs() * prims.realize(pow2(candidate - exponent))
        error = (error * 2.0 ** (bits - spec.element.emax - 1)).round().clamp(max=2.0**bits).to(torch.int64)
        totals.append((error * error).sum(spec.axis + 1, keepdim=True))
    best, least = candidates[0], totals[0]
    for candidate, total in zip(candidates[1:], totals[1:], strict=True):
        best = torch.where(total < least, candidate, best)
        least = torch.minimum(total, least)
    return best


def _quantize_blocks(x: Tensor, spec: MXSpec, random: Tensor | None, prims: Prims) -> tuple[Tensor, Tensor, Tensor]:
    """Return exponent and finiteness (..., blocks, 1, ...), and the element values (..., blocks, block, ...) of finite
    blocks."""
    blocks = _to_blocks(prims.realize_if_costly(x).to(torch.float32), spec)
    exponent, finite = shared_exponent(blocks, spec, prims)
    if random is not None:
        random = _to_blocks(random, spec)
    v = _in_units(blocks, exponent, finite, spec.rounding, prims)
    return exponent, finite, prims.round_to_element(v, spec.element, spec.rounding, random)


def _in_units(blocks: Tensor, exponent: Tensor, finite: Tensor, rounding: str, prims: Prims) -> Tensor:
    """Return `blocks * 2**-exponent`. It may underflow to zero, except where that would change the result of a directed
    rounding."""
    v = times_pow2(blocks, -exponent, finite, prims.realize)
    if not ROUNDINGS[rounding].directed:
        return v
    smallest = (blocks.view(torch.int32) & _SIGN | 1 << 23).view(torch.float32)  # +-2**-126
    return torch.where((v.abs() < 2.0**-126) & (blocks != 0), smallest, v)


def _to_blocks(x: Tensor, spec: MXSpec) -> Tensor:
    """(..., n, ...) -> (..., blocks, block, ...), padded with zeros (`group_count`)."""
    length, block = x.shape[spec.axis], spec.block_size
    if isinstance(length, int):
        block = max(1, min(block, length))  # one short block needs no padding
    return split_axis(x, spec.axis, block)


def _clamp(exponent: Tensor, spec: MXSpec) -> Tensor:
    """Clamp `exponent` to the range of the scale. No block needs one below -213, and `times_pow2` supports down to
    -252."""
    limit = 2 ** (spec.scale_exp_bits - 1) - 1
    return exponent.clamp(max(-limit, -252), limit)


def _scale_bytes(exponent: Tensor, finite: Tensor, spec: MXSpec, length: int, prims: Prims = elements) -> Tensor:
    scale = prims.scale_bytes(exponent, finite).squeeze(spec.axis + 1)
    return trim_axis(scale, spec.axis, -(-length // spec.block_size))


def random_bits(seed: Tensor, shape: torch.Size) -> Tensor:
    """seed: () int64 -> a number in [0, 2**31) for each position of a tensor of that shape, int32.

    The i-th value in row-major order takes the upper 31 bits of word `i % 4` of the block whose counter is `i // 4`
    and whose key is the seed.
    """
    count = 1
    for size in shape:
        count = count * size
    position = torch.arange(count, device=seed.device, dtype=torch.int64)
    words = philox(position >> 2, seed)
    word = words[3]
    for lane in range(3):
        word = torch.where((position & 3) == lane, words[lane], word)
    return (word >> 1).to(torch.int32).reshape(shape)


def philox(counter: Tensor, seed: Tensor) -> list[Tensor]:
    """counter: (...) int64, seed: () int64 -> four words (...) int64 in [0, 2**32)."""
    c = [counter & _WORD, counter >> 32 & _WORD, torch.zeros_like(counter), torch.zeros_like(counter)]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = (_multiply(c[2 * i], _MULTIPLIERS[i]) for i in range(2))
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [key[i] + _KEY_STEPS[i] & _WORD for i in range(2)]
    return c


def _multiply(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return upper and lower 32 bits of the 64-bit product. It multiplies 16-bit halves of a, because int64 would
    overflow."""
    low = (a & 0xFFFF) * m
    high = (a >> 16) * m + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
