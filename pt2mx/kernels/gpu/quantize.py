"""The kernels on an NVIDIA GPU, in Triton: each one pass over memory. The device code is in `kernels`.

They run on the tensor's device and the current stream, do not wait for the device, and can be captured in a CUDA graph.
They return None for blocks of more than `_LARGEST_BLOCK` values, which do not fit in a program's registers, and for
blocks of several rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.kernels import packing
from pt2mx.kernels.constants import float_scale_constants, spec_constants
from pt2mx.kernels.gpu import kernels
from pt2mx.kernels.gpu.float_scales import ScaleConstants
from pt2mx.kernels.gpu.tiles import Constants
from pt2mx.kernels.packing import resized
from pt2mx.modes import ROUNDINGS
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.hadamard import RotatedFakeQuantize
    from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize
    from pt2mx.ops.stochastic import RandomBits


_LARGEST_BLOCK = 4096


class Tile(NamedTuple):
    """The work of a program: values of its tile, warps, and, if inner is not 1, neighbours along inner per thread."""

    values: int
    warps: int
    vector: int = 1


#: (whether inner is not 1) -> tile; the fastest on an H200, in bf16 and blocks of 32
_FAKE_QUANTIZE = {False: Tile(4096, 4), True: Tile(4096, 2, 8)}
_ROTATED_FAKE_QUANTIZE = {False: Tile(1024, 1)}
_DEQUANTIZE = {False: Tile(1024, 1), True: Tile(8192, 2, 8)}
_QUANTIZE = {False: Tile(2048, 1), True: Tile(4096, 1, 4)}
_QUANTIZE_PACKED = {False: Tile(4096, 4), True: Tile(4096, 1, 4)}
_QUANTIZE_BF16X2 = {False: Tile(2048, 1), True: Tile(4096, 1, 4)}
#: for all kernels if the scale is searched or the rounding is stochastic: much code for each value
_LONG = {False: Tile(1024, 4), True: Tile(2048, 2)}
#: values per thread if a block is longer than the tile
_VALUES_PER_THREAD = 128


def quantize(call: Quantize[Tensor], spec: MXSpec) -> tuple[Tensor, Tensor] | None:
    """x: (..., n, ...) -> scale (..., ceil(n / block), ...) in the dtype of the scale format, codes (..., bytes, ...)
    uint8."""
    length, tensor_scale = call.x.shape[spec.axis], call.tensor_scale
    if not _holds(spec, length):
        return None
    x = call.x.contiguous()
    bits = spec.element.bits if packs(spec, length) else 8
    size = packing.packed_length(length, bits)
    codes = x.new_empty(resized(x, spec.axis, size), dtype=torch.uint8)
    scale = x.new_empty(spec.scale_shape(x.shape), dtype=spec.scale_dtype)
    others: tuple[Tensor | None, ...] = (tensor_scale, call.seed)
    kernel, tiles, word = kernels.quantize_kernel, _QUANTIZE, packing.group_of(bits)
    if _suits_bf16x2(x, spec):
        kernel, tiles, word, others = kernels.quantize_bf16x2_kernel, _QUANTIZE_BF16X2, _four(bits), ()
    elif packing.is_packed(bits):
        tiles, word = _QUANTIZE_PACKED, _four(bits) if _streams(x, spec) else word
    _launch(kernel, tiles, x.shape, spec, word, tensor_scale, x, codes, as_integers(scale), *others, length, size)
    if bits != spec.element.bits:
        codes = packing.pack(codes.to(torch.int32), spec.axis, spec.element.bits)
    return scale, codes


def dequantize(call: Dequantize[Tensor], spec: MXSpec, length: int) -> Tensor | None:
    """codes: (..., bytes, ...) uint8, scale: (..., ceil(length / block), ...) -> (..., length, ...) `dtype`."""
    if not _holds(spec, length):
        return None
    codes, tensor_scale, bits = call.codes, call.tensor_scale, spec.element.bits
    if not packs(spec, length):
        codes, bits = packing.unpack(codes, spec.axis, bits).narrow(spec.axis, 0, length).to(torch.uint8), 8
    codes, scale = codes.contiguous(), as_integers(call.scale.contiguous())
    y = codes.new_empty(resized(codes, spec.axis, length), dtype=call.dtype)
    size = codes.shape[spec.axis]
    word, arguments = packing.group_of(bits), (codes, scale, y, tensor_scale, length, size)
    _launch(kernels.dequantize_kernel, _DEQUANTIZE, y.shape, spec, word, tensor_scale, *arguments)
    return y


def fake_quantize(call: FakeQuantize[Tensor], spec: MXSpec) -> Tensor | None:
    """x: (..., n, ...) -> dequantize(quantize(x)) in x's dtype."""
    length, tensor_scale = call.x.shape[spec.axis], call.tensor_scale
    if not _holds(spec, length):
        return None
    x = call.x.contiguous()
    y = torch.empty_like(x)
    arguments = x, y, tensor_scale, call.seed, length
    _launch(kernels.fake_quantize_kernel, _FAKE_QUANTIZE, x.shape, spec, _BYTE, tensor_scale, *arguments)
    return y


def rotated_fake_quantize(call: RotatedFakeQuantize[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor | None:
    """x: (..., n) -> fake_quantize(rotate(x)) in `dtype`, blocks of both along the last dimension; scales without a
    tensor scale."""
    x, size, tiles, n = call.x, call.size, _ROTATED_FAKE_QUANTIZE, call.x.shape[-1]
    if spec.has_tensor_scale or size > tiles[False].values or not _streams(x, spec) or not _holds(spec, n):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(kernels.fake_quantize_kernel, tiles, x.shape, spec, _BYTE, None, x, y, None, None, n, ROTATION=size)
    return y.to(dtype)


def clip_gradient(call: ClipGradient[Tensor], spec: MXSpec) -> Tensor | None:
    """grad, x: (..., n, ...) -> grad, zero where x is beyond the largest value of its block's scale."""
    length, tensor_scale = call.x.shape[spec.axis], call.tensor_scale
    if not _holds(spec, length):
        return None
    grad, x = call.grad.contiguous(), call.x.contiguous()
    y = torch.empty_like(grad)
    arguments = grad, x, y, tensor_scale, length
    _launch(kernels.clip_gradient_kernel, _FAKE_QUANTIZE, x.shape, spec, _BYTE, tensor_scale, *arguments)
    return y


def random_bits(call: RandomBits[Tensor]) -> Tensor:
    """seed: () int64 -> a number in [0, 2**31) for each position of a tensor of that size, int32."""
    seed, out = call.seed, torch.empty(torch.Size(call.size), dtype=torch.int32, device=call.seed.device)
    if out.numel():
        with torch.cuda.device_of(out):
            kernels.random_bits_kernel[(triton.cdiv(out.numel(), 1024),)](seed, out, out.numel(), SIZE=1024)
    return out


def _holds(spec: MXSpec, length: int) -> bool:
    """Return whether a block is of one row, and fits in a program's registers."""
    return spec.block_rows == 1 and min(spec.block_size, length) <= _LARGEST_BLOCK


def as_integers(scale: Tensor) -> Tensor:
    """Return scales as their codes, which kernels read and write."""
    return scale.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[scale.itemsize])


def packs(spec: MXSpec, length: int) -> bool:
    """Return whether the kernels can pack the codes. A code must take one byte, or four codes two or more whole bytes.
    No two blocks may share a byte, so that each can be packed on its own."""
    codes, size = packing.group_of(spec.element.bits)
    fits = codes == 1 or (4 % codes == 0 and 4 // codes * size >= 2)
    return fits and (spec.block_size >= length or spec.block_size % codes == 0)


def _streams(x: Tensor, spec: MXSpec) -> bool:
    """Return whether lines are whole blocks of a power of two, and contiguous, and so are their codes."""
    length = x.shape[spec.axis]
    block = min(spec.block_size, length)
    return _inner(x.shape, spec) == 1 and block >= 16 and block & (block - 1) == 0 and length % block == 0


def _suits_bf16x2(x: Tensor, spec: MXSpec) -> bool:
    """Return whether `bf16x2` supports x: its arithmetic, and that no end of a block, word or code group splits four
    values."""
    element, length = spec.element, x.shape[spec.axis]
    if x.dtype != torch.bfloat16 or spec.rounding != "even" or not spec.has_power_of_two_scale or spec.searches:
        return False
    if element.is_int or element.mantissa_bits > 5 or torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    if _inner(x.shape, spec) == 1:
        return _streams(x, spec) and x.data_ptr() % 4 == 0
    return length % 4 == 0 and (spec.block_size % 4 == 0 or spec.block_size >= length)


#: codes and bytes of a word
_BYTE = (1, 1)


def _four(bits: int) -> tuple[int, int]:
    return 4, packing.packed_length(4, bits)


def _inner(shape: torch.Size, spec: MXSpec) -> int:
    return math.prod(shape[spec.axis + 1 :])


def _launch(
    kernel: triton.JITFunction,
    tiles: dict[bool, Tile],
    shape: torch.Size,
    spec: MXSpec,
    word: tuple[int, int],
    tensor_scale: Tensor | None,
    *arguments: Tensor | int | None,
    **compile_time: int,
) -> None:
    """Run `kernel` on every tile of a tensor of that shape; `word` as in `Constants`. `arguments` have the tensor scale
    again, if the kernel reads it."""
    if 0 in shape:
        return
    inner = _inner(shape, spec)
    length, outer = shape[spec.axis], math.prod(shape[: spec.axis])
    lines = outer * -(-length // spec.block_size) * inner
    tile = (_LONG if _is_long(spec) else tiles)[inner > 1]
    wide = lines * min(spec.block_size, length) >= 2**31 - max(tile.values, tile.vector * 2 * _LARGEST_BLOCK)
    constants = constants_of(spec, word, length, inner, wide, tile, tensor_scale is not None)
    warps = max(tile.warps, constants.lines * constants.tile // (32 * _VALUES_PER_THREAD))
    with torch.cuda.device_of(arguments[0]):
        grid = (triton.cdiv(lines, constants.lines),)
        kernel[grid](*arguments, inner, lines, constants, **compile_time, num_warps=warps)


def _is_long(spec: MXSpec) -> bool:
    return spec.searches or ROUNDINGS[spec.rounding].random


@functools.lru_cache(maxsize=4096)
def constants_of(
    spec: MXSpec,
    word: tuple[int, int],
    length: int,
    inner: int,
    wide: bool,
    tile: Tile,
    has_tensor_scale: bool = False,
) -> Constants:
    rounding = ROUNDINGS[spec.rounding]
    word_codes, word_bytes = word
    block = min(spec.block_size, length)
    size = max(triton.next_power_of_2(block), word_codes)
    lines = max(tile.vector, tile.values // size)
    scale = None if spec.has_power_of_two_scale else scale_constants(spec, has_tensor_scale)
    return Constants(
        **spec_constants(spec),
        rounding=spec.rounding,
        nearest="even" if rounding.random else spec.rounding,
        directed=rounding.directed,
        random=rounding.random,
        word_codes=word_codes,
        word_bytes=word_bytes,
        block=block,
        tile=size,
        lines=lines,
        strided=inner > 1,
        whole=length % block == 0,
        aligned=inner % lines == 0,
        vector=tile.vector,
        wide=wide,
        scale=scale,
    )


def scale_constants(spec: MXSpec, has_tensor_scale: bool) -> ScaleConstants:
    """Return the constants of a format with a significand. A tensor scale that is missing counts as 1."""
    numbers = float_scale_constants(spec)
    numbers |= {
        "max_normal": numbers["max_value"],
        "stored": str(spec.scale_dtype).removeprefix("torch."),
        "tensor": numbers["tensor"] if has_tensor_scale else "",
    }
    return ScaleConstants(**{f.name: numbers[f.name] for f in dataclasses.fields(ScaleConstants)})
