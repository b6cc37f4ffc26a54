"""The definition of MX quantization and of the sums of its errors, in plain torch operations that Inductor can trace.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 6.3; the steps follow the design page.
Everything is computed in fp32 on bit patterns: a floating-point log2 is wrong one ulp below a power of two, so that one
bf16 block in 150 would get another exponent. All constants of a format come from `pt2mx.formats`,
`pt2mx.scale_formats` and `pt2mx.modes`. `axis` is non-negative here, and the callers in `pt2mx.ops` check the inputs.
`tensor_scale`: () fp32, for scale formats with one (`pt2mx.kernels.float_scales`). `random`: the numbers for stochastic
rounding (`random_bits`), in the shape of x. `prims`: the primitives, by default `pt2mx.kernels.elements`; all
implementations give the same bits.

Philox-4x32-10 gives the random numbers (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
A value's number depends only on the seed and its position in the tensor, so every kernel draws the same numbers, in any
order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pt2mx.kernels import elements, exponent_scales, float_scales
from pt2mx.kernels.elements import Prims
from pt2mx.kernels.float_scales import codes_of
from pt2mx.kernels.packing import pack, pad_axis, size_of_group, split_axis, trim_axis, unpack
from pt2mx.kernels.scale_search import BlockScale, in_units
from pt2mx.spec import MXSpec

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
#: `spec.has_power_of_two_scale` -> the module of its scales
_SCALES = {True: exponent_scales, False: float_scales}


def quantize(
    x: Tensor, spec: MXSpec, random: Tensor | None = None, prims: Prims = elements, tensor_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x: (..., n, ...) fp32, fp16 or bf16 -> scale (..., ceil(n / block), ...) in the dtype of the scale format, data
    (..., bytes, ...) uint8."""
    scale, values = quantize_blocks(x, spec, random, prims, tensor_scale)
    codes = elements.encode(torch.where(scale.finite, values, 0.0), spec.element)
    codes = from_blocks(codes, spec, x.shape, prims)
    return stored_scales(scale, spec, x.shape), pack(codes, spec.axis, spec.element.bits)


def scales(x: Tensor, spec: MXSpec, tensor_scale: Tensor | None = None) -> Tensor:
    """x: (..., n, ...) -> the scales that `quantize` gives, (..., ceil(n / block), ...), without the codes."""
    scale = _scale_of(to_blocks(x.to(torch.float32), spec), spec, tensor_scale, elements)
    return stored_scales(scale, spec, x.shape)


def codes_by_scales(x: Tensor, spec: MXSpec, stored: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
    """x: (..., n, ...) finite, stored: its scales with a significand, as `quantize` gives them, of blocks of one row ->
    data (..., bytes, ...) uint8."""
    t, codes = float_scales.tensor_scale_of(tensor_scale, spec, x), codes_of(stored).unsqueeze(spec.axis + 1)
    scale = float_scales.FloatScale(codes, torch.isfinite(t), t, spec, elements)
    blocks = to_blocks(x.to(torch.float32), spec)
    values = elements.round_to_element(in_units(scale, blocks, spec.rounding), spec.element, spec.rounding)
    return pack(
        from_blocks(elements.encode(values, spec.element), spec, x.shape, elements), spec.axis, spec.element.bits
    )


def of_each_value(scale: Tensor, axis: int, block: int, length: int) -> Tensor:
    """scale: (..., ceil(length / block), ...) -> the scale of each value, (..., length, ...)."""
    return scale.repeat_interleave(min(block, max(length, 1)), axis).narrow(axis, 0, length)


def dequantize(
    data: Tensor,
    scale: Tensor,
    spec: MXSpec,
    dtype: torch.dtype,
    length: int,
    prims: Prims = elements,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """data: (..., bytes, ...) uint8, scale: (..., ceil(length / block), ...) -> (..., length, ...) `dtype`."""
    codes = trim_axis(unpack(data, spec.axis, spec.element.bits), spec.axis, length)
    blocks = prims.decode(to_blocks(codes, spec), spec.element)  # (..., blocks, block, ...)
    scale = codes_of(scale)
    if spec.block_rows > 1:
        scale = pad_axis(scale, spec.row_axis(scale.dim()), 1)
    scale = split_axis(scale, spec.axis, 1)  # (..., blocks, 1, ...), padded like the codes
    times_stored = _SCALES[spec.has_power_of_two_scale].times_stored
    blocks = times_stored(blocks, scale, spec, tensor_scale, prims).to(dtype)
    return from_blocks(blocks, spec, codes.shape, prims)


def fake_quantize(
    x: Tensor, spec: MXSpec, random: Tensor | None = None, prims: Prims = elements, tensor_scale: Tensor | None = None
) -> Tensor:
    """x: (..., n, ...) -> dequantize(quantize(x)) to the bit, in x's dtype."""
    scale, values = quantize_blocks(x, spec, random, prims, tensor_scale)
    return from_blocks(scale.multiply(values).to(x.dtype), spec, x.shape, prims)


def clip_gradient(
    grad: Tensor, x: Tensor, spec: MXSpec, prims: Prims = elements, tensor_scale: Tensor | None = None
) -> Tensor:
    """grad, x: (..., n, ...) -> grad, zero where x is beyond the largest value of its block's scale."""
    blocks = to_blocks(x.to(torch.float32), spec)
    v = _scale_of(blocks, spec, tensor_scale, prims).divide(blocks)
    saturated = (v > spec.element.max_normal) | (v < spec.element.lowest)
    return grad.masked_fill(from_blocks(saturated, spec, x.shape, prims), 0.0)


def error_sums(x: Tensor, y: Tensor, scale: Tensor, spec: MXSpec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return sums over the blocks of a tensor whose scale is above zero; the first sum is over all blocks.

    Args:
        x: (..., n, ...) float32, float16 or bfloat16.
        y: what its quantization gives, of the same shape and dtype.
        scale: (..., blocks, ...) float32, the scale of each block, NaN for a block with an Inf or a NaN.
        spec: the format.

    Returns:
        0-d tensors. Counts, int64: of Inf and NaN, of values that saturate, and of values that become zero. Sums of
        squares, float64: of the values, and of their errors.
    """
    row_axis = spec.row_axis(x.dim()) if spec.block_rows > 1 else None
    for axis, block in ((spec.axis, spec.block_size), (row_axis, spec.block_rows)):
        if axis is not None:
            scale = of_each_value(scale, axis, block, x.shape[axis])
    has_scale = scale > 0
    values, results = (torch.where(has_scale, tensor.float(), 0.0) for tensor in (x, y))
    # the ends are exact in float32: elements have few bits. A comparison with NaN is false
    saturated = (values > spec.element.max_normal * scale) | (values < spec.element.lowest * scale)
    return (
        (~(x.abs() < math.inf)).count_nonzero(),  # `isfinite` takes twice as long, and Inductor takes x * 0 for 0
        saturated.count_nonzero(),
        values.count_nonzero() - results.count_nonzero(),  # no format changes a zero
        _power(values),
        _power(values - results),
    )


def _power(x: Tensor) -> Tensor:
    """Return the sum of squares, float64."""
    wide = x.flatten().double()
    return torch.dot(wide, wide)  # without a temporary for the squares


def _scale_of(blocks: Tensor, spec: MXSpec, tensor_scale: Tensor | None, prims: Prims) -> BlockScale:
    return _SCALES[spec.has_power_of_two_scale].scale_of(blocks, spec, tensor_scale, prims)


def quantize_blocks(
    x: Tensor, spec: MXSpec, random: Tensor | None, prims: Prims, tensor_scale: Tensor | None
) -> tuple[BlockScale, Tensor]:
    """Return scales (..., blocks, 1, ...), and the element values (..., blocks, block, ...) of finite blocks."""
    blocks = to_blocks(prims.realize_if_costly(x).to(torch.float32), spec)
    scale = _scale_of(blocks, spec, tensor_scale, prims)
    if random is not None:
        random = to_blocks(random, spec)
    v = in_units(scale, blocks, spec.rounding)
    return scale, prims.round_to_element(v, spec.element, spec.rounding, random)


def to_blocks(x: Tensor, spec: MXSpec) -> Tensor:
    """(..., n, ...) -> (..., blocks, block, ...), padded with zeros (`group_count`). The rows of a block follow each
    other in `block`; their dimension counts blocks."""
    blocks = split_axis(x, spec.axis, size_of_group(spec.block_size, x.shape[spec.axis]))
    if spec.block_rows == 1:
        return blocks
    rows = spec.row_axis(x.dim())
    at = rows + (rows > spec.axis)  # in `blocks`
    blocks = split_axis(blocks, at, size_of_group(spec.block_rows, x.shape[rows]))
    return blocks.movedim(at + 1, spec.axis + 1).flatten(spec.axis + 1, spec.axis + 2)


def from_blocks(blocks: Tensor, spec: MXSpec, shape: torch.Size, prims: Prims) -> Tensor:
    """(..., blocks, block, ...) -> (..., n, ...) of that shape, the filling of the last blocks cut off."""
    if spec.block_rows > 1:
        rows = spec.row_axis(len(shape))
        at = rows + (rows > spec.axis)
        size = size_of_group(spec.block_rows, shape[rows])
        blocks = blocks.unflatten(spec.axis + 1, (size, -1)).movedim(spec.axis + 1, at + 1)
        blocks = trim_axis(blocks.flatten(at, at + 1), at, shape[rows])
    return prims.from_blocks(blocks, spec.axis, shape[spec.axis])


def stored_scales(scale: BlockScale, spec: MXSpec, shape: torch.Size) -> Tensor:
    """Return the stored scales (..., ceil(n / block), ...) of values of that shape."""
    stored = trim_axis(scale.stored().squeeze(spec.axis + 1), spec.axis, -(-shape[spec.axis] // spec.block_size))
    if spec.block_rows == 1:
        return stored
    rows = spec.row_axis(len(shape))
    return trim_axis(stored, rows, -(-shape[rows] // spec.block_rows))


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
