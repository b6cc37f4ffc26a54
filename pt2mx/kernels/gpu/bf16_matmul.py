"""Matmuls and attention of bfloat16 values on an NVIDIA GPU's tensor cores, as exact as in float32, in Triton.

`bf16_gemm_kernel` multiplies matrices, and rows with the weights of experts; `dense_attention_kernel` is attention.
Values that bfloat16 does not represent are rounded to it.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.kernels.constants import BLOCK, LEAST_ROWS, WIDEST, supports_epilogue
from pt2mx.kernels.float_scales import has_each
from pt2mx.kernels.gpu.bf16_gemm_kernel import Sizes as GemmSizes
from pt2mx.kernels.gpu.bf16_gemm_kernel import bf16_gemm_kernel, grouped_gemm_kernel
from pt2mx.kernels.gpu.dense_attention_kernel import Sizes, Strided, dense_attention_kernel
from pt2mx.kernels.gpu.device import multiprocessors_of
from pt2mx.kernels.gpu.hadamard import rotate
from pt2mx.kernels.gpu.quantize import Tile, constants_of
from pt2mx.kernels.select import run_kernel
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.attention import AttentionBfloat16, MatmulBfloat16
    from pt2mx.ops.linear import GroupedLinearMX, LinearMX


#: the queries and the keys of a program
_ROWS, _KEYS = 64, 64
#: products that tensor cores sum; the largest of 32, 64 and 128 that is as exact as float32
_DEPTH = 64
#: the shortest part of a sum for which a separate program runs, if there are few tiles
_LEAST_DEPTH = 256


class _Tile(NamedTuple):
    """A tile of the result that a program computes, and how it is launched."""

    rows: int
    columns: int
    stages: int = 4


#: the fastest tiles on an H200, largest first. The first tile runs that fits the rows and columns and gives each
#: multiprocessor a tile
_TILES = (_Tile(64, 128), _Tile(64, 64), _Tile(32, 64), _Tile(16, 64, 5))


def matmul(call: MatmulBfloat16[Tensor]) -> Tensor:
    """x: (*batch, M, K), y: (*batch, K, N) -> (*batch, M, N) fp32."""
    return _multiply(call.x.to(torch.bfloat16), call.y.to(torch.bfloat16), None)


def linear(call: LinearMX[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor | None:
    """Return None unless x is in bfloat16, and the result in float32, and bfloat16 represents the weight without its
    tensor scale."""
    weight = _weight_in_bfloat16(call, spec, dtype)
    if weight is None:
        return None
    bias, tensor_scale = call.bias, call.tensor_scale
    x = rotate(call.x, call.rotation) if call.rotation else call.x
    rows, added = x.reshape(-1, x.shape[-1]), bias if tensor_scale is None else None
    out = _multiply(rows, weight.t(), added)
    if tensor_scale is not None:
        out = _scaled(out, spec, tensor_scale)
        out = out if bias is None else out.add_(bias)
    return out.view(*x.shape[:-1], len(weight))


def grouped_linear(call: GroupedLinearMX[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor | None:
    """Return None as `linear` does."""
    weight = _weight_in_bfloat16(call, spec, dtype)
    if weight is None:
        return None
    x, offs, tensor_scale = call.x, call.offs, call.tensor_scale
    (rows, k), (experts, n, _) = x.shape, weight.shape
    out = x.new_empty((rows, n), dtype=torch.float32)
    if not out.numel() or not experts:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = _tile_of(experts, triton.cdiv(rows, experts), n, x.device)
    tiles_m = rows // tile.rows + min(experts, rows)  # each expert may fill its last tile only in part
    with torch.cuda.device_of(x):
        grouped_gemm_kernel[tiles_m * triton.cdiv(n, tile.columns),](
            *(x, weight, offs.contiguous(), out, (rows, experts, n, k, tiles_m, x.stride(0))),
            GemmSizes(tile.rows, tile.columns, _DEPTH, k % _DEPTH == 0, False, triton.next_power_of_2(experts)),
            num_warps=4,
            num_stages=tile.stages,
        )
    if tensor_scale is None:
        return out
    if has_each(tensor_scale):  # of the expert of each row; rows past the last offset are undefined
        expert = torch.searchsorted(offs, torch.arange(rows, device=x.device, dtype=offs.dtype), right=True)
        tensor_scale = tensor_scale[expert.clamp(max=experts - 1)].unsqueeze(1)
    return _scaled(out, spec, tensor_scale)


def _weight_in_bfloat16(
    call: LinearMX[Tensor] | GroupedLinearMX[Tensor], spec: MXSpec, dtype: torch.dtype
) -> Tensor | None:
    """Return the weight in bfloat16, without its tensor scale; None as `linear` does."""
    spec_of_weight, k = _in_bfloat16(spec), call.x.shape[-1]
    if call.x.dtype != torch.bfloat16 or dtype != torch.float32 or spec_of_weight is None:
        return None
    return run_kernel(call.dequantization(torch.bfloat16, k).replace(tensor_scale=None), spec_of_weight, k)


@functools.lru_cache(maxsize=1024)
def _in_bfloat16(spec: MXSpec) -> MXSpec | None:
    """Return the spec of the values without their tensor scale; None if bfloat16 does not represent them."""
    if not spec.has_power_of_two_scale and spec.significant_bits > 8:
        return None
    return spec.without_tensor_scale()


def _scaled(out: Tensor, spec: MXSpec, tensor_scale: Tensor) -> Tensor:
    """Multiply a result in place by the tensor scale of its weight."""
    return out.div_(tensor_scale) if spec.divides_by_tensor_scale else out.mul_(tensor_scale)


def _multiply(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """x: (*batch, M, K) bfloat16, y: (*batch, K, N) bfloat16, bias: (N,) fp32 or None -> (*batch, M, N) fp32."""
    out = x.new_empty((*x.shape[:-1], y.shape[-1]), dtype=torch.float32)
    if not out.numel():
        return out
    x, y = (t[(None,) * (4 - t.dim())] if t.dim() < 4 else t.flatten(0, -4) for t in (x, y))
    x = x if x.stride(3) == 1 else x.contiguous()
    (first, second, m, k), n = x.shape, y.shape[3]
    tile = _tile_of(first * second, m, n, x.device)
    tiles = first * second * triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns)
    parts = _parts(tiles, k, x.device) if first * second == 1 else 1
    if parts > 1:
        x_parts = x[0, 0].unflatten(1, (1, parts, -1)).movedim(0, 2)  # (1, parts, M, K / parts)
        y_parts = y[0, 0].unflatten(0, (1, parts, -1))
        sums = _launch(tile, x_parts, y_parts, None, x.new_empty((parts, m, n), dtype=torch.float32))
        result = sums.sum(0)
        if bias is not None:
            result.add_(bias)
        return result.view(out.shape)
    return _launch(tile, x, y, bias, out)


def _launch(tile: _Tile, x: Tensor, y: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x: (first, second, M, K), y: (first, second, K, N) bfloat16 -> out: as many values (first, second, M, N) fp32."""
    (first, second, m, k), n = x.shape, y.shape[3]
    grid = first * second * triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns)
    with torch.cuda.device_of(x):
        bf16_gemm_kernel[grid,](
            *(x, y, x if bias is None else bias.contiguous(), out, (m, n, k, second)),
            *(x.stride()[:3], y.stride()),
            GemmSizes(tile.rows, tile.columns, _DEPTH, k % _DEPTH == 0, bias is not None),
            num_warps=4,
            num_stages=tile.stages,
        )
    return out


def _parts(tiles: int, k: int, device: torch.device) -> int:
    """Return into how many parts to split each sum, because one program per tile may leave multiprocessors idle."""
    parts = 1
    while 2 * parts * tiles <= multiprocessors_of(device) and k % (2 * parts) == 0 and k // (2 * parts) >= _LEAST_DEPTH:
        parts *= 2
    return parts


def _tile_of(matrices: int, m: int, n: int, device: torch.device) -> _Tile:
    """Return the largest tile that fits and keeps all multiprocessors busy, else the smallest that fits."""
    smallest = _TILES[-1]
    for tile in _TILES:
        if tile.rows < 2 * m and tile.columns < 2 * n:
            smallest = tile
            tiles = matrices * math.ceil(m / tile.rows) * math.ceil(n / tile.columns)
            if tiles >= multiprocessors_of(device):
                return tile
    return smallest


def attention(
    call: AttentionBfloat16[Tensor], dtype: torch.dtype, quantization: MXSpec | None, out_dtype: torch.dtype
) -> Tensor | None:
    """Compute attention as `pt2mx.kernels.cpu.bf16_matmul.attention` does. Return None for wide heads, few queries,
    empty tensors, and quantizations that the kernel does not support."""
    query, key, value, mask = call.query, call.key, call.value, call.mask_4d
    (batch, heads, queries, width), (_, key_heads, keys, value_width) = query.shape, value.shape
    fits = max(width, value_width) <= WIDEST["cuda"] and queries >= LEAST_ROWS
    if not fits or 0 in (query.numel(), value.numel()) or dtype not in (torch.float32, torch.bfloat16):
        return None
    columns, constants = max(16, triton.next_power_of_2(value_width)), None
    if quantization is not None:
        if not supports_epilogue(quantization, value_width, dtype):
            return None
        constants = constants_of(quantization, (1, 1), BLOCK, 1, False, Tile(_ROWS * columns, 4))
    out = query.new_empty((batch, queries, heads, value_width), dtype=out_dtype)
    narrow = [t.to(torch.bfloat16) for t in (query, key, value)]
    narrow = [t if t.stride(3) == 1 else t.contiguous() for t in narrow]
    kind, expanded = "none", query  # a placeholder that the kernel does not read
    if mask is not None:
        expanded = mask.expand(batch, heads, queries, keys)
        kind, expanded = ("bool", expanded.view(torch.uint8)) if mask.dtype == torch.bool else ("added", expanded)
    sizes = Sizes(
        HEAD_DIM=width,
        VALUE_DIM=value_width,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        BLOCK_V=columns,
        BLOCK_M=_ROWS,
        BLOCK_N=_KEYS,
        CAUSAL=call.is_causal,
        MASK=kind,
        MASK_ROWS=expanded.stride(2) != 0,
        EVEN_N=keys % _KEYS == 0,
        EXACT=dtype == torch.float32,
    )
    with torch.cuda.device_of(query):
        dense_attention_kernel[batch * heads, triton.cdiv(queries, _ROWS)](
            *(Strided(t, *t.stride()[:3]) for t in narrow),
            Strided(expanded, *expanded.stride()),
            out,
            width**-0.5 if call.scale is None else call.scale,
            (queries, keys, heads, heads // key_heads),
            sizes,
            constants,
            num_warps=4,
            num_stages=2,
        )
    return out.transpose(1, 2)
