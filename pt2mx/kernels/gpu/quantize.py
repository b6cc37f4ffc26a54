"""The kernels on an NVIDIA GPU, in Triton: each one pass over memory. The device code is in `kernels`.

They run on the tensor's device and the current stream, do not wait for the device, and can be captured in a CUDA graph.
They return None for blocks of more than `_LARGEST_BLOCK` values, which do not fit in a program's registers.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.kernels import packing
from pt2mx.kernels.constants import spec_constants
from pt2mx.kernels.gpu import kernels
from pt2mx.kernels.gpu.tiles import Constants
from pt2mx.kernels.packing import resized
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.spec import MXSpec

__all__ = ["clip_gradient", "dequantize", "fake_quantize", "quantize", "random_bits", "rotated_fake_quantize"]

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


def quantize(x: Tensor, spec: MXSpec, seed: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """x: (..., n, ...) -> scale (..., ceil(n / block), ...) uint8, codes (..., bytes, ...) uint8."""
    if not _holds(spec, x.shape[spec.axis]):
        return None
    x, length = x.contiguous(), x.shape[spec.axis]
    bits = spec.element.bits if _packs(spec, length) else 8
    size = packing.packed_length(length, bits)
    codes = x.new_empty(resized(x, spec.axis, size), dtype=torch.uint8)
    scale = x.new_empty(resized(x, spec.axis, -(-length // spec.block_size)), dtype=torch.uint8)
    seeds: tuple[Tensor | None, ...] = (seed,)
    kernel, tiles, word = kernels.quantize_kernel, _QUANTIZE, packing.group_of(bits)
    if _suits_bf16x2(x, spec):
        kernel, tiles, word, seeds = kernels.quantize_bf16x2_kernel, _QUANTIZE_BF16X2, _four(bits), ()
    elif packing.is_packed(bits):
        tiles, word = _QUANTIZE_PACKED, _four(bits) if _streams(x, spec) else word
    _launch(kernel, tiles, x.shape, spec, word, x, codes, scale, *seeds, length, size)
    if bits != spec.element.bits:
        codes = packing.pack(codes.to(torch.int32), spec.axis, spec.element.bits)
    return scale, codes


def dequantize(codes: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int) -> Tensor | None:
    """codes: (..., bytes, ...) uint8, scale: (..., ceil(length / block), ...) uint8 -> (..., length, ...) `dtype`."""
    if not _holds(spec, length):
        return None
    bits = spec.element.bits
    if not _packs(spec, length):
        codes, bits = packing.unpack(codes, spec.axis, bits).narrow(spec.axis, 0, length).to(torch.uint8), 8
    codes, scale = codes.contiguous(), scale.contiguous()
    y = codes.new_empty(resized(codes, spec.axis, length), dtype=dtype)
    size = codes.shape[spec.axis]
    _launch(
        kernels.dequantize_kernel, _DEQUANTIZE, y.shape, spec, packing.group_of(bits), codes, scale, y, length, size
    )
    return y


def fake_quantize(x: Tensor, spec: MXSpec, seed: Tensor | None) -> Tensor | None:
    """x: (..., n, ...) -> dequantize(quantize(x)) in x's dtype."""
    if not _holds(spec, x.shape[spec.axis]):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(kernels.fake_quantize_kernel, _FAKE_QUANTIZE, x.shape, spec, _BYTE, x, y, seed, x.shape[spec.axis])
    return y


def rotated_fake_quantize(x: Tensor, size: int, spec: MXSpec, dtype: torch.dtype) -> Tensor | None:
    """x: (..., n) -> fake_quantize(rotate(x)) in `dtype`, blocks of both along the last dimension."""
    tiles, n = _ROTATED_FAKE_QUANTIZE, x.shape[-1]
    if size > tiles[False].values or not _streams(x, spec) or not _holds(spec, n):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(kernels.fake_quantize_kernel, tiles, x.shape, spec, _BYTE, x, y, None, n, ROTATION=size)
    return y.to(dtype)


def clip_gradient(grad: Tensor, x: Tensor, spec: MXSpec) -> Tensor | None:
    """grad, x: (..., n, ...) -> grad, zero where x is beyond the largest value of its block's scale."""
    if not _holds(spec, x.shape[spec.axis]):
        return None
    grad, x = grad.contiguous(), x.contiguous()
    y = torch.empty_like(grad)
    _launch(kernels.clip_gradient_kernel, _FAKE_QUANTIZE, x.shape, spec, _BYTE, grad, x, y, x.shape[spec.axis])
    return y


def random_bits(seed: Tensor, shape: torch.Size) -> Tensor:
    """seed: () int64 -> a number in [0, 2**31) for each position of a tensor of that shape, int32."""
    out = torch.empty(shape, dtype=torch.int32, device=seed.device)
    if out.numel():
        with torch.cuda.device_of(out):
            kernels.random_bits_kernel[(triton.cdiv(out.numel(), 1024),)](seed, out, out.numel(), SIZE=1024)
    return out


def _holds(spec: MXSpec, length: int) -> bool:
    """Return whether a block fits in a program's registers."""
    return min(spec.block_size, length) <= _LARGEST_BLOCK


def _packs(spec: MXSpec, length: int) -> bool:
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
    element, mode, length = spec.element, SCALE_MODES[spec.scale_mode], x.shape[spec.axis]
    if x.dtype != torch.bfloat16 or spec.rounding != "even" or mode.searches:
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
    *arguments: Tensor | int | None,
    **compile_time: int,
) -> None:
    """Run `kernel` on every tile of a tensor of that shape; `word` as in `Constants`."""
    if 0 in shape:
        return
    inner = _inner(shape, spec)
    length, outer = shape[spec.axis], math.prod(shape[: spec.axis])
    lines = outer * -(-length // spec.block_size) * inner
    long = SCALE_MODES[spec.scale_mode].searches or ROUNDINGS[spec.rounding].random
    tile = (_LONG if long else tiles)[inner > 1]
    wide = lines * min(spec.block_size, length) >= 2**31 - max(tile.values, tile.vector * 2 * _LARGEST_BLOCK)
    constants = constants_of(spec, word, length, inner, wide, tile)
    warps = max(tile.warps, constants.lines * constants.tile // (32 * _VALUES_PER_THREAD))
    with torch.cuda.device_of(arguments[0]):
        grid = (triton.cdiv(lines, constants.lines),)
        kernel[grid](*arguments, inner, lines, constants, **compile_time, num_warps=warps)


@functools.lru_cache(maxsize=4096)
def constants_of(spec: MXSpec, word: tuple[int, int], length: int, inner: int, wide: bool, tile: Tile) -> Constants:
    rounding = ROUNDINGS[spec.rounding]
    word_codes, word_bytes = word
    block = min(spec.block_size, length)
    size = max(triton.next_power_of_2(block), word_codes)
    lines = max(tile.vector, tile.values // size)
    return Constants(
        **spec_constants(spec.element, SCALE_MODES[spec.scale_mode], spec.block_size),
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
    )
