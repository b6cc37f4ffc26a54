"""Matmuls and attention by the CPU's matrix instructions for bfloat16, in C++ (`src/matmul.cpp`,
`src/dense_attention.cpp`). Operands are bfloat16, or float32 with values that bfloat16 represents. Each call packs
both. Sums are in fp32, in an order that does not depend on the number of threads."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from pt2mx.kernels.constants import LEAST_ROWS, WIDEST, supports_epilogue
from pt2mx.kernels.cpu.activations import epilogue_of
from pt2mx.kernels.cpu.build import DTYPES, is_available, load
from pt2mx.kernels.cpu.calls import DenseAttentionCall, MatmulCall
from pt2mx.kernels.cpu.linear import is_computed
from pt2mx.spec import MXSpec

__all__ = ["attention", "bf16_isa", "matmul"]


@functools.cache
def bf16_isa() -> int:
    """Return the matrix instructions for bfloat16 of this machine, numbered as in C++; 0 for none."""
    return int(load()[0].pt2mx_bf16_isa()) if is_available() else 0


def matmul(x: Tensor, y: Tensor) -> Tensor | None:
    """x: (*batch, M, K), y: (*batch, K, N) -> (*batch, M, N) fp32. Return None without matrix instructions, for few
    rows, and for values that bfloat16 does not represent or whose products could be subnormal."""
    if not bf16_isa() or x.shape[-2] < LEAST_ROWS or 0 in (x.numel(), y.numel()):
        return None
    library, parallel_for = load()
    out = x.new_empty((*x.shape[:-1], y.shape[-1]), dtype=torch.float32)
    rows, columns = (_of_four_dimensions(t.to(torch.float32)) for t in (x, y))
    rows = rows if rows.stride(3) == 1 else rows.contiguous()
    columns = columns if 1 in columns.stride()[2:] else columns.contiguous()
    call = MatmulCall(
        isa=bf16_isa(),
        threads=torch.get_num_threads(),
        first=rows.shape[0],
        second=rows.shape[1],
        m=rows.shape[2],
        n=columns.shape[3],
        k=rows.shape[3],
        x_stride=rows.stride()[:3],
        y_stride=columns.stride(),
        x=rows.data_ptr(),
        y=columns.data_ptr(),
        out=out.data_ptr(),
    )
    return out if is_computed(library.pt2mx_matmul(ctypes.addressof(call), parallel_for)) else None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dtype: torch.dtype = torch.float32,
    quantization: MXSpec | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Compute `scaled_dot_product_attention`. query: (B, heads, S, D), key: (B, heads of the keys, L, D), value: (B,
    heads of the keys, L, W), mask: (B or 1, heads or 1, S or 1, L or 1) bool or `dtype`, or None -> (B, heads, S, W) in
    `dtype`, fp32 or bfloat16, in memory as (B, S, heads, W), or quantized along W, in `out_dtype`. Return None as
    `matmul` does, and for quantizations that the kernel does not support. In float32 `value` may have any values."""
    (batch, heads, queries, width), (_, key_heads, keys, _) = query.shape, key.shape
    if not bf16_isa() or queries < LEAST_ROWS or width > WIDEST["cpu"] or 0 in (query.numel(), value.numel()):
        return None
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    library, parallel_for = load()
    epilogue = None
    if quantization is not None:
        if not supports_epilogue(quantization, value.shape[-1], dtype):
            return None
        epilogue = epilogue_of(quantization, "none", out_dtype or dtype)
    out = query.new_empty((batch, queries, heads, value.shape[-1]), dtype=out_dtype or dtype)
    tensors = [t.to(dtype) for t in (query, key, value)]
    tensors = [t if t.stride(3) == 1 else t.contiguous() for t in tensors]
    call = DenseAttentionCall(
        isa=bf16_isa(),
        causal=is_causal,
        dtype=DTYPES.index(dtype),
        threads=torch.get_num_threads(),
        batch=batch,
        heads=heads,
        group=heads // key_heads,
        queries=queries,
        keys=keys,
        width=width,
        value_width=value.shape[-1],
        factor=width**-0.5 if scale is None else scale,
        epilogue=None if epilogue is None else ctypes.addressof(epilogue),
        out=out.data_ptr(),
    )
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        setattr(call, name, tensor.data_ptr())
        setattr(call, f"{name}_stride", tensor.stride()[:3])
    if mask is not None:
        mask = mask.expand(*mask.shape[:3], keys)
        mask = (mask if mask.stride(3) == 1 else mask.contiguous()).expand(batch, heads, queries, keys)
        setattr(call, "bool_mask" if mask.dtype == torch.bool else "additive_mask", mask.data_ptr())
        call.mask_stride = mask.stride()[:3]
    computed = is_computed(library.pt2mx_dense_attention(ctypes.addressof(call), parallel_for))
    return out.transpose(1, 2) if computed else None


def _of_four_dimensions(x: Tensor) -> Tensor:
    """x: (..., n, m) -> (a, b, n, m), a view where its strides allow."""
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)
