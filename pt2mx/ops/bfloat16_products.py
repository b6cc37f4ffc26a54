"""`torch.ops.pt2mx.matmul_bfloat16`, `attention_bfloat16`: products of two activations on units for bfloat16, exactly.

Quantized values are bfloat16 (`pt2mx.fx.passes.activation_matmuls_bf16` finds them), so that their products are exact
there; sums are in float32, and so are results in float32 models. Lowered programs call these operators, of bfloat16
models for attention, and Inductor keeps them calls. torch's own operators define them;
`pt2mx.kernels.select` lists the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.attention import broadcasts
from pt2mx.ops.autocast import register_autocast
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.ops.quantized_activations import check_quantization
from pt2mx.spec import MXSpec


def _matmul(x: Tensor, y: Tensor, target_dtype: torch.dtype | None = None) -> Tensor:
    dtype = _check_matmul(x, y, target_dtype)
    # torch's matmul in bfloat16 runs on the same units
    result = run_kernel("matmul_bfloat16", x, y) if dtype == torch.float32 else None
    return dense_matmul(x, y, dtype) if result is None else result


def dense_matmul(x: Tensor, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The definition of `matmul_bfloat16`."""
    return torch.matmul(x.to(dtype or x.dtype), y.to(dtype or y.dtype))


def _matmul_fake(x: Tensor, y: Tensor, target_dtype: torch.dtype | None = None) -> Tensor:
    dtype = _check_matmul(x, y, target_dtype)
    return x.new_empty((*x.shape[:-1], y.shape[-1]), dtype=dtype)


def _check_matmul(x: Tensor, y: Tensor, target_dtype: torch.dtype | None) -> torch.dtype:
    dtype = _check_operands(target_dtype, x=x, y=y)
    fits = x.dim() == y.dim() >= 2 and x.shape[:-2] == y.shape[:-2] and x.shape[-1] == y.shape[-2]
    if not fits:
        raise MXError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must be (*batch, M, K) and (*batch, K, N)")
    return dtype


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    target_dtype: torch.dtype | None = None,
    *quantization: Any,
) -> Tensor:
    dtype, spec, out_dtype = _check_attention(query, key, value, mask, is_causal, target_dtype, *quantization)
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    args = query, key, value, mask, is_causal, scale, dtype
    result = run_kernel("attention_bfloat16", *args, spec, out_dtype)
    if result is not None:
        return result
    product = run_kernel("attention_bfloat16", *args) if spec else None
    product = dense_attention(*args) if product is None else product
    return quantized(product, *quantization) if spec else product


def quantized(
    product: Tensor,
    elem: str | None,
    block_size: int = 32,
    scale_mode: str = "floor",
    rounding: str = "even",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Quantize a product along W: (B, heads, S, W), which keeps its order in memory. No element leaves it as it is."""
    if elem is None:
        return product
    found = ops.fake_quantize_mx(product.transpose(1, 2), elem, block_size, -1, scale_mode, rounding)
    return found.to(dtype or product.dtype).transpose(1, 2)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    *quantization: Any,
) -> Tensor:
    """The definition of `attention_bfloat16`."""
    grouped = bool(query.shape[1] != key.shape[1])  # also of symbolic sizes
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    query, key, value = (tensor.to(dtype or query.dtype) for tensor in (query, key, value))
    found = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    found = found.transpose(1, 2).contiguous().transpose(1, 2)
    return quantized(found, *quantization) if quantization else found


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    target_dtype: torch.dtype | None = None,
    *quantization: Any,
) -> Tensor:
    *_, dtype = _check_attention(query, key, value, mask, is_causal, target_dtype, *quantization)
    batch, heads, queries, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[3]), dtype=dtype).transpose(1, 2)


def _check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    target_dtype: torch.dtype | None,
    elem: str | None = None,
    block_size: int = 32,
    scale_mode: str = "floor",
    rounding: str = "even",
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.dtype, MXSpec | None, torch.dtype]:
    """Return the dtype of the product, how it is quantized or None, and the dtype of the result."""
    dtype = _check_product(query, key, value, mask, is_causal, target_dtype)
    if elem is None:
        if out_dtype is not None:
            raise MXError(f"out_dtype={out_dtype} is of a quantized result, and no element is given")
        return dtype, None, dtype
    try:
        return dtype, *check_quantization(value, elem, block_size, scale_mode, rounding, out_dtype or dtype)
    except MXError as error:
        raise MXError(f"the result of attention: {error}") from None


def _check_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    target_dtype: torch.dtype | None,
) -> torch.dtype:
    dtype = _check_operands(target_dtype, query=query, key=key, value=value)
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    fits = query.dim() == key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3]
    if not fits or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise MXError(
            "query {}, key {} and value {} must be (B, heads, S, D), (B, heads, L, D) and (B, heads, L, W)".format(
                *shapes
            )
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if heads if key_heads == 0 else heads % key_heads:
        raise MXError(f"{heads} heads of the query must be a multiple of the {key_heads} heads of the key")
    if mask is None:
        return dtype
    if is_causal:
        raise MXError("is_causal is true and there is a mask: give one of them")
    if mask.dtype not in (torch.bool, dtype) or mask.dim() > 4 or mask.device != query.device:
        raise MXError(
            f"the mask is {mask.dtype} of {mask.dim()} dimensions on {mask.device}: it must be booleans or "
            f"{dtype}, of 4 dimensions at most, on {query.device}"
        )
    wanted = *query.shape[:3], key.shape[2]
    if not broadcasts(mask.shape, wanted[4 - mask.dim() :]):
        raise MXError(f"a mask of {tuple(mask.shape)} does not broadcast to {tuple(wanted)}")
    return dtype


def _check_operands(target_dtype: torch.dtype | None, **operands: Tensor) -> torch.dtype:
    """Return the dtype of the result."""
    first = next(iter(operands.values()))
    if not {first.dtype, target_dtype or first.dtype} <= set(HIGH_PRECISION):
        raise MXError(
            f"operands are {first.dtype} and target_dtype is {target_dtype}: both must be float32, float16 or bfloat16"
        )
    for name, tensor in operands.items():
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise MXError(
                f"{name} is {tensor.dtype} on {tensor.device} and {next(iter(operands))} {first.dtype} on "
                f"{first.device}: all must have one dtype and device"
            )
    return target_dtype or first.dtype


def _save_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, _ = inputs
    ctx.save_for_backward(x, y)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    return (grad @ y.to(grad.dtype).mT).to(x.dtype), (x.to(grad.dtype).mT @ grad).to(y.dtype), None


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, mask, *ctx.rest = inputs[:7]
    ctx.save_for_backward(query, key, value, mask)


@once_differentiable  # as torch's attention: a second derivative is an error
def _attention_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of torch's attention, which is computed again; that of a quantization is the identity."""
    *operands, mask = ctx.saved_tensors
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):  # as the operands were cast already
        leaves = [tensor.detach().requires_grad_() for tensor in operands]
        added = mask is not None and mask.is_floating_point() and ctx.needs_input_grad[3]
        own = mask.detach().requires_grad_() if added else mask
        query, key, value = leaves
        result = dense_attention(query, key, value, own, *ctx.rest)
    wanted = [*leaves, own] if added else leaves
    found = torch.autograd.grad(result, wanted, grad.to(result.dtype))
    return (*found, *(None,) * (12 - len(found)))


_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

#: operator -> its schema, kernel, fake kernel, and gradient
_OPERATORS: dict[str, Any] = {
    "matmul_bfloat16": (
        "(Tensor x, Tensor y, ScalarType? target_dtype=None) -> Tensor",
        *(_matmul, _matmul_fake, _save_matmul, _matmul_backward),
    ),
    "attention_bfloat16": (
        "(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool is_causal=False, float? scale=None, "
        "ScalarType? target_dtype=None, str? elem_dtype_name=None, int block_size=32, "
        'str scale_mode="floor", str rounding="even", ScalarType? out_dtype=None) -> Tensor',
        *(_attention, _attention_fake, _save_attention, _attention_backward),
    ),
}

for _name, (_schema, _kernel, _fake, _setup, _backward) in _OPERATORS.items():
    torch.library.define(f"pt2mx::{_name}", _schema, tags=_TAGS)
    torch.library.impl(f"pt2mx::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"pt2mx::{_name}", _fake)
    torch.library.register_autograd(f"pt2mx::{_name}", _backward, setup_context=_setup)

matmul_bfloat16 = torch.ops.pt2mx.matmul_bfloat16.default
attention_bfloat16 = torch.ops.pt2mx.attention_bfloat16.default
register_autocast(matmul_bfloat16)
register_autocast(attention_bfloat16)
