"""`torch.ops.pt2mx.matmul_bfloat16`, `attention_bfloat16`: products of two activations on units for bfloat16, exactly.

Quantized values are bfloat16 (`pt2mx.fx.passes.products_of_activations` finds them), so that their products are exact
there; sums and results are in float32. Lowered programs of float32 models call these operators, and Inductor keeps them
calls. torch's own operators define them; `_TWINS` lists where a faster twin serves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.errors import MXError
from pt2mx.kernels.select import device_with_kernels
from pt2mx.ops.attention import broadcasts
from pt2mx.ops.autocast import register_autocast
from pt2mx.ops.checks import HIGH_PRECISION

#: type of device -> module of `pt2mx.kernels` with functions that give None for what they do not serve
_TWINS = {"cpu": "cpu.bfloat16_products", "cuda": "gpu.bfloat16_products"}


def _call_twin(function: str, first: Tensor, *rest: Any) -> Tensor | None:
    module = _TWINS.get(device_with_kernels(first) or "") if first.dtype == torch.float32 else None
    return getattr(importlib.import_module(f"pt2mx.kernels.{module}"), function)(first, *rest) if module else None


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    _check_matmul(x, y)
    found = _call_twin("matmul", x, y)
    return torch.matmul(x, y) if found is None else found


def _matmul_fake(x: Tensor, y: Tensor) -> Tensor:
    _check_matmul(x, y)
    return x.new_empty((*x.shape[:-1], y.shape[-1]))


def _check_matmul(x: Tensor, y: Tensor) -> None:
    _check_operands(x=x, y=y)
    fits = x.dim() == y.dim() >= 2 and x.shape[:-2] == y.shape[:-2] and x.shape[-1] == y.shape[-2]
    if not fits:
        raise MXError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must be (*batch, M, K) and (*batch, K, N)")


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """torch's attention, whatever strides its result has."""
    grouped = bool(query.shape[1] != key.shape[1])  # also of symbolic sizes
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    _check_attention(query, key, value, mask, is_causal)
    own = None if mask is None else mask[(None,) * (4 - mask.dim())]
    found = _call_twin("attention", query, key, value, own, is_causal, scale)
    if found is None:
        found = dense_attention(query, key, value, mask, is_causal, scale)
    return found.transpose(1, 2).contiguous().transpose(1, 2)


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    _check_attention(query, key, value, mask, is_causal)
    batch, heads, queries, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[3])).transpose(1, 2)


def _check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> None:
    _check_operands(query=query, key=key, value=value)
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
        return
    if is_causal:
        raise MXError("is_causal is true and there is a mask: give one of them")
    if mask.dtype not in (torch.bool, query.dtype) or mask.dim() > 4 or mask.device != query.device:
        raise MXError(
            f"the mask is {mask.dtype} of {mask.dim()} dimensions on {mask.device}: it must be booleans or "
            f"{query.dtype}, of 4 dimensions at most, on {query.device}"
        )
    wanted = *query.shape[:3], key.shape[2]
    if not broadcasts(mask.shape, wanted[4 - mask.dim() :]):
        raise MXError(f"a mask of {tuple(mask.shape)} does not broadcast to {tuple(wanted)}")


def _check_operands(**operands: Tensor) -> None:
    first = next(iter(operands.values()))
    if first.dtype not in HIGH_PRECISION:
        raise MXError(f"operands are {first.dtype}: they must be float32, float16 or bfloat16")
    for name, tensor in operands.items():
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise MXError(
                f"{name} is {tensor.dtype} on {tensor.device} and {next(iter(operands))} {first.dtype} on "
                f"{first.device}: all must have one dtype and device"
            )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[4:]
    ctx.save_for_backward(*inputs[:4])


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return grad @ y.mT, x.mT @ grad


def _attention_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of torch's attention, which is computed again."""
    *operands, mask = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in operands]
        added = mask is not None and mask.is_floating_point() and ctx.needs_input_grad[3]
        own = mask.detach().requires_grad_() if added else mask
        query, key, value = leaves
        result = dense_attention(query, key, value, own, *ctx.rest)
    wanted = [*leaves, own] if added else leaves
    found = torch.autograd.grad(result, wanted, grad)
    return (*found, *(None,) * (6 - len(found)))


_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_OPERATORS: dict[str, tuple[str, Callable[..., Tensor], Callable[..., Tensor], Callable[..., Any]]] = {
    "matmul_bfloat16": ("(Tensor x, Tensor y) -> Tensor", _matmul, _matmul_fake, _matmul_backward),
    "attention_bfloat16": (
        "(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool is_causal=False, float? scale=None) "
        "-> Tensor",
        _attention,
        _attention_fake,
        _attention_backward,
    ),
}

for _name, (_schema, _kernel, _fake, _backward) in _OPERATORS.items():
    torch.library.define(f"pt2mx::{_name}", _schema, tags=_TAGS)
    torch.library.impl(f"pt2mx::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"pt2mx::{_name}", _fake)
    torch.library.register_autograd(f"pt2mx::{_name}", _backward, setup_context=_save)

matmul_bfloat16 = torch.ops.pt2mx.matmul_bfloat16.default
attention_bfloat16 = torch.ops.pt2mx.attention_bfloat16.default
register_autocast(matmul_bfloat16)
register_autocast(attention_bfloat16)
