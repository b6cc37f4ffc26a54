"""The definitions of matmuls, convolutions and attention with packed operands: dequantize, then call torch's operator.

They run if no kernel supports a call: for large batches, where the matmul takes most of the time anyway, and on devices
without kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.formats import ElementFormat
from pt2mx.kernels.float_scales import has_each
from pt2mx.kernels.gpu.mma_layout import from_mma_layout
from pt2mx.kernels.select import run_kernel
from pt2mx.spec import MXSpec

__all__ = ["Packed", "attend", "conv2d", "grouped_linear", "linear", "linear_mma_layout"]

#: (codes, scales) of keys or values: (B, heads, L, bytes) uint8 and (B, heads, L, blocks)
Packed = tuple[Tensor, Tensor]


def linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    spec: MXSpec,
    rotation: int = 0,
    dtype: torch.dtype | None = None,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """x: (..., K), data: (N, bytes) uint8, scale: (N, blocks), bias: (N,) in `dtype` or None, tensor_scale: () fp32 or
    None -> (..., N) in `dtype`, by default x's; `rotation`: values of x that are rotated together first, 0 for
    none."""
    x = run_kernel("hadamard", x, rotation) if rotation else x
    x = x.to(dtype or x.dtype)
    return F.linear(x, dense_weight(x, data, scale, spec, tensor_scale), bias)


def grouped_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    offs: Tensor,
    spec: MXSpec,
    dtype: torch.dtype | None = None,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """x: (T, K), data: (E, N, bytes) uint8, scale: (E, N, blocks), offs: (E,) int32, tensor_scale: () or (E,) fp32 or
    None -> (T, N) in `dtype`, by default x's."""
    x = x.to(dtype or x.dtype)
    weight = dense_weight(x, data, scale, spec, tensor_scale)  # (E, N, K)
    return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offs)


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Compute `torch._grouped_mm` by operators that torch can trace. Torch's own operator runs only for bfloat16 with
    rows of whole 16 bytes; otherwise each expert multiplies all rows. x: (T, K), weight: (E, K, N), offs: (E,) int32 ->
    (T, N)."""
    if x.dtype == torch.bfloat16 and weight.shape[1] % 8 == weight.shape[2] % 8 == 0:
        return torch._grouped_mm(x, weight, offs=offs)
    row = torch.arange(x.shape[0], device=x.device)
    expert = torch.searchsorted(offs, row, right=True, out_int32=True)  # (T,)
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for i, each in enumerate(weight.unbind()):
        y = torch.where((expert == i).unsqueeze(-1), x @ each, y)
    return y


def linear_mma_layout(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    element: ElementFormat,
    n: int,
    rotation: int = 0,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """x: (..., K) bfloat16, codes, scale: as of `to_mma_layout`, bias: (n,) bfloat16 or None -> (..., n) bfloat16;
    `rotation` as above."""
    x = run_kernel("hadamard", x, rotation) if rotation else x
    return F.linear(x, from_mma_layout(codes, scale, element, n, x.shape[-1], tensor_scale), bias)


def conv2d(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    spec: MXSpec,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    dtype: torch.dtype | None = None,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """x: (B, H, W, C), data: (N, *kernel, bytes) uint8, scale: (N, *kernel, blocks), bias: (N,) in `dtype` or None,
    tensor_scale: () fp32 or None -> (B, H', W', N) in `dtype`, by default x's."""
    x = x.to(dtype or x.dtype)
    weight = dense_weight(x, data, scale, spec, tensor_scale).permute(0, 3, 1, 2)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding, dilation)
    return y.permute(0, 2, 3, 1).contiguous()


def conv2d_shape(x: Tensor, data: Tensor, conv_args: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of a convolution's result, (B, H', W', N); `conv_args`: stride, padding and dilation."""
    pairs = zip(x.shape[1:3], data.shape[1:3], *conv_args, strict=True)
    size = [(n + 2 * padding - dilation * (taps - 1) - 1) // stride + 1 for n, taps, stride, padding, dilation in pairs]
    return x.shape[0], *size, data.shape[0]


def attend(
    query: Tensor,
    key: Packed,
    value: Packed,
    spec: MXSpec,
    value_width: int,
    mask: Tensor | None,
    scale: float | None,
    key_tensor_scale: Tensor | None = None,
    value_tensor_scale: Tensor | None = None,
) -> Tensor:
    """query: (B, heads, S, D), heads a multiple of the heads of the keys, mask: (B or 1, heads or 1, S, L) booleans,
    false where a key is hidden, or None, tensor scales: () fp32 or None -> (B, heads, S, value_width)."""
    spec = spec.replace(axis=3)
    keys = run_kernel("dequantize_mx", *key, spec, query.dtype, query.shape[-1], key_tensor_scale)
    values = run_kernel("dequantize_mx", *value, spec, query.dtype, value_width, value_tensor_scale)
    if not query.numel():  # torch's attention on a GPU returns None for no heads
        return query.new_zeros((*query.shape[:3], value_width))
    grouped = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)


def dense_weight(x: Tensor, data: Tensor, scale: Tensor, spec: MXSpec, tensor_scale: Tensor | None = None) -> Tensor:
    """Return the dequantized weight for x: (..., K), in x's dtype; data: (..., bytes of K), tensor_scale: () fp32 or
    None, or of each matrix of three-dimensional data."""
    if has_each(tensor_scale):
        matrices = zip(data, scale, tensor_scale, strict=True)  # type: ignore[arg-type]
        return torch.stack([dense_weight(x, d, s, spec.replace(axis=spec.axis - 1), t) for d, s, t in matrices])
    return run_kernel("dequantize_mx", data, scale, spec, x.dtype, x.shape[-1], tensor_scale)
