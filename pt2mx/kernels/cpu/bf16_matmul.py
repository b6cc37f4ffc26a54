"""Matmuls and attention by the CPU's matrix instructions for bfloat16, in C++ (`src/matmul.cpp`,
`src/dense_attention.cpp`). Operands are bfloat16, or float32 with values that bfloat16 represents. Each call packs
both. Sums are in fp32, in an order that does not depend on the number of threads."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.kernels.constants import LEAST_ROWS, WIDEST, supports_epilogue
from pt2mx.kernels.cpu.activations import epilogue_of
from pt2mx.kernels.cpu.build import DTYPES, is_available, load, run
from pt2mx.kernels.cpu.calls import DenseAttentionCall, MatmulCall
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.attention import AttentionBfloat16, MatmulBfloat16


@functools.cache
def bf16_isa() -> int:
    """Return the matrix instructions for bfloat16 of this machine, numbered as in C++; 0 for none."""
    return int(load()[0].pt2mx_bf16_isa()) if is_available() else 0


def matmul(call: MatmulBfloat16[Tensor]) -> Tensor | None:
    """x: (*batch, M, K), y: (*batch, K, N) -> (*batch, M, N) fp32. Return None without matrix instructions, for few
    rows, and for values that bfloat16 does not represent or whose products could be subnormal."""
    x, y = call.x, call.y
    if not bf16_isa() or x.shape[-2] < LEAST_ROWS or 0 in (x.numel(), y.numel()):
        return None
    out = x.new_empty((*x.shape[:-1], y.shape[-1]), dtype=torch.float32)
    rows, columns = (_of_four_dimensions(t.to(torch.float32)) for t in (x, y))
    rows = rows if rows.stride(3) == 1 else rows.contiguous()
    columns = columns if 1 in columns.stride()[2:] else columns.contiguous()
    structure = MatmulCall(
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
    return out if run("pt2mx_matmul", structure) else None


def attention(
    call: AttentionBfloat16[Tensor], dtype: torch.dtype, quantization: MXSpec | None, out_dtype: torch.dtype
) -> Tensor | None:
    """Compute `scaled_dot_product_attention` in `dtype`, fp32 or bfloat16, in memory as (B, S, heads, W), quantized
    along W if that is asked. Return None as `matmul` does, and for quantizations that the kernel does not support. In
    float32 `value` may have any values."""
    query, key, value, mask = call.query, call.key, call.value, call.mask_4d
    (batch, heads, queries, width), (_, key_heads, keys, _) = query.shape, key.shape
    if not bf16_isa() or queries < LEAST_ROWS or width > WIDEST["cpu"] or 0 in (query.numel(), value.numel()):
        return None
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    epilogue = None
    if quantization is not None:
        if not supports_epilogue(quantization, value.shape[-1], dtype):
            return None
        epilogue = epilogue_of(quantization, "none", out_dtype)
    out = query.new_empty((batch, queries, heads, value.shape[-1]), dtype=out_dtype)
    tensors = [t.to(dtype) for t in (query, key, value)]
    tensors = [t if t.stride(3) == 1 else t.contiguous() for t in tensors]
    structure = DenseAttentionCall(
        isa=bf16_isa(),
        causal=call.is_causal,
        dtype=DTYPES.index(dtype),
        threads=torch.get_num_threads(),
        batch=batch,
        heads=heads,
        group=heads // key_heads,
        queries=queries,
        keys=keys,
        width=width,
        value_width=value.shape[-1],
        factor=width**-0.5 if call.scale is None else call.scale,
        epilogue=None if epilogue is None else ctypes.addressof(epilogue),
        out=out.data_ptr(),
    )
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        setattr(structure, name, tensor.data_ptr())
        setattr(structure, f"{name}_stride", tensor.stride()[:3])
    if mask is not None:
        mask = mask.expand(*mask.shape[:3], keys)
        mask = (mask if mask.stride(3) == 1 else mask.contiguous()).expand(batch, heads, queries, keys)
        setattr(structure, "bool_mask" if mask.dtype == torch.bool else "additive_mask", mask.data_ptr())
        structure.mask_stride = mask.stride()[:3]
    return out.transpose(1, 2) if run("pt2mx_dense_attention", structure) else None


def _of_four_dimensions(x: Tensor) -> Tensor:
    """x: (..., n, m) -> (a, b, n, m), a view where its strides allow."""
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)
