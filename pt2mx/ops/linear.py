"""`torch.ops.pt2mx.linear_mx`, `grouped_linear_mx`, `linear_mx_mma_layout`: products with weights that stay packed.

They compute what `linear(x, dequantize_mx(weight))` does, with fp32 sums in another order, and are what the lowered
program calls (`pt2mx.fx.lower`). `pt2mx.kernels.dequantize_then_matmul` defines them on every device; `_TWINS` lists
where a faster twin serves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.kernels.dequantize_then_matmul import grouped_mm
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS
from pt2mx.kernels.hadamard import rotate_back
from pt2mx.kernels.select import device_with_kernels
from pt2mx.ops.autocast import register_autocast
from pt2mx.ops.checks import HIGH_PRECISION, check_packed
from pt2mx.ops.hadamard import check_rotation
from pt2mx.spec import MXSpec

#: function, type of device -> module of `pt2mx.kernels` whose function of that name is faster than the definition
_TWINS: dict[tuple[str, str | None], str] = {
    ("linear", "cpu"): "cpu.linear",
    ("grouped_linear", "cpu"): "cpu.linear",
    ("linear_mma_layout", "cuda"): "gpu.linear",
}


def _kernels_for(function: str, x: Tensor, element: ElementFormat) -> ModuleType:
    module = _TWINS.get((function, device_with_kernels(x, element)), "dequantize_then_matmul")
    return importlib.import_module(f"pt2mx.kernels.{module}")


def _linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, *modes: Any) -> Tensor:
    """x: (..., K) float, data: (N, bytes of K) uint8, scale: (N, ceil(K / block_size)) uint8, bias: (N,) as the result
    or None -> (..., N) in the target dtype, by default x's."""
    spec, rotation, dtype = check_linear(x, data, scale, bias, *modes)
    return _kernels_for("linear", x, spec.element).linear(x, data, scale, bias, spec, rotation, dtype)


def _linear_fake(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, *modes: Any) -> Tensor:
    _, _, dtype = check_linear(x, data, scale, bias, *modes)
    return x.new_empty((*x.shape[:-1], data.shape[0]), dtype=dtype)


def check_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    elem: str,
    block_size: int,
    rotation: int = 0,
    target_dtype: torch.dtype | None = None,
) -> tuple[MXSpec, int, torch.dtype]:
    """Return the weight's spec, the rotation and the dtype of the result; MXError for what does not fit."""
    spec = _check(x, data, scale, elem, block_size, dimensions=2, rotation=rotation)
    dtype = _result_dtype(x, target_dtype)
    if bias is not None and (bias.shape != data.shape[:1] or bias.dtype != dtype or bias.device != x.device):
        raise MXError(
            f"bias of shape {tuple(bias.shape)}, {bias.dtype} on {bias.device} does not fit a weight of "
            f"{data.shape[0]} rows and a result in {dtype} on {x.device}"
        )
    return spec, rotation, dtype


def _grouped_linear(x: Tensor, data: Tensor, scale: Tensor, offs: Tensor, *modes: Any) -> Tensor:
    """x: (T, K) float, its rows sorted by expert, data: (E, N, bytes of K) uint8, scale: (E, N, ceil(K / block_size))
    uint8, offs: (E,) int32, the row after the last of each expert -> (T, N) in the target dtype, by default x's, as
    `torch._grouped_mm`."""
    spec, dtype = _check_grouped(x, data, scale, offs, *modes)
    return _kernels_for("grouped_linear", x, spec.element).grouped_linear(x, data, scale, offs, spec, dtype)


def _grouped_linear_fake(x: Tensor, data: Tensor, scale: Tensor, offs: Tensor, *modes: Any) -> Tensor:
    _, dtype = _check_grouped(x, data, scale, offs, *modes)
    return x.new_empty((x.shape[0], data.shape[1]), dtype=dtype)


def _check_grouped(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    offs: Tensor,
    elem: str,
    block_size: int,
    target_dtype: torch.dtype | None = None,
) -> tuple[MXSpec, torch.dtype]:
    spec = _check(x, data, scale, elem, block_size, dimensions=3)
    if x.dim() != 2 or offs.shape != data.shape[:1] or offs.dtype != torch.int32 or offs.device != x.device:
        raise MXError(
            f"x must be (T, K) and offs ({data.shape[0]},) int32 on {x.device}, an end for each expert; got "
            f"{tuple(x.shape)} and {tuple(offs.shape)} {offs.dtype} on {offs.device}"
        )
    return spec, _result_dtype(x, target_dtype)


def _result_dtype(x: Tensor, target_dtype: torch.dtype | None) -> torch.dtype:
    dtype = target_dtype or x.dtype
    if dtype not in HIGH_PRECISION:
        raise MXError(f"target_dtype={dtype} must be float32, float16 or bfloat16, or None for that of x")
    return dtype


def _linear_mma_layout(
    x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, elem: str, n: int, rotation: int = 0
) -> Tensor:
    """x: (..., K) bfloat16, data and scale as `pt2mx.kernels.gpu.mma_layout.to_mma_layout` gives them, bias: (n,)
    bfloat16 or None -> (..., n) bfloat16."""
    _check_mma_layout(x, data, scale, bias, elem, n, rotation)
    element = ELEMENTS[elem]
    return _kernels_for("linear_mma_layout", x, element).linear_mma_layout(x, data, scale, bias, element, n, rotation)


def _linear_mma_layout_fake(
    x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, elem: str, n: int, rotation: int = 0
) -> Tensor:
    _check_mma_layout(x, data, scale, bias, elem, n, rotation)
    return x.new_empty((*x.shape[:-1], n))


def _check(
    x: Tensor, data: Tensor, scale: Tensor, elem: str, block_size: int, dimensions: int, rotation: int = 0
) -> MXSpec:
    if not x.dim() or data.dim() != dimensions:
        raise MXError(
            f"x of shape {tuple(x.shape)} and a weight of {data.dim()} dimensions, not (..., K) and {dimensions}"
        )
    if x.device != data.device:
        raise MXError(f"x is on {x.device} and the weight on {data.device}: move one to the device of the other")
    if rotation:
        check_rotation(x, rotation)
    try:
        return check_packed(data, scale, elem, block_size, x.dtype, -1, x.shape[-1])[0]
    except MXError as error:
        raise MXError(f"x of shape {tuple(x.shape)} times a weight of {tuple(data.shape)} bytes: {error}") from None


def _check_mma_layout(
    x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, elem: str, n: int, rotation: int
) -> None:
    if elem not in FRAGMENTS:
        raise MXError(f"no MMA layout of {elem!r}: allowed are {', '.join(sorted(FRAGMENTS))}")
    if x.dtype != torch.bfloat16 or not x.dim() or (bias is not None and bias.dtype != torch.bfloat16):
        raise MXError(f"weights in the MMA layout take bfloat16 x and bias of at least one dimension, not {x.dtype}")
    if x.shape[-1] % 8:
        raise MXError(f"the MMA layout is of a K that 8 divides, not {x.shape[-1]}: use linear_mx")
    if rotation:
        check_rotation(x, rotation)
    fragment, steps = FRAGMENTS[elem], -(-x.shape[-1] // FRAGMENTS[elem].k_step)
    shapes = (-(-n // 16), steps, 2, fragment.words // 4, 32, 16), (-(-n // 16), steps, 2, fragment.scales, 32)
    if (tuple(data.shape), tuple(scale.shape)) != shapes or not (data.dtype == scale.dtype == torch.uint8):
        raise MXError(
            f"data {tuple(data.shape)} and scale {tuple(scale.shape)} are no MMA layout of a ({n}, {x.shape[-1]}) "
            f"weight of {elem}: those are {shapes[0]} and {shapes[1]} uint8"
        )


def _save_weight(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, data, scale, _, ctx.elem, ctx.block_size, ctx.rotation, _ = inputs
    ctx.length, ctx.dtype = x.shape[-1], x.dtype
    ctx.save_for_backward(data, scale)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    data, scale = ctx.saved_tensors
    weight = ops.dequantize_mx(data, scale, ctx.elem, ctx.block_size, grad.dtype, -1, ctx.length)
    bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
    x = rotate_back(grad @ weight, ctx.rotation) if ctx.rotation else grad @ weight
    return x.to(ctx.dtype), None, None, bias, None, None, None, None


def _save_experts(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, data, scale, offs, ctx.elem, ctx.block_size, _ = inputs
    ctx.length, ctx.dtype = x.shape[-1], x.dtype
    ctx.save_for_backward(data, scale, offs)


def _grouped_linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    data, scale, offs = ctx.saved_tensors
    weight = ops.dequantize_mx(data, scale, ctx.elem, ctx.block_size, grad.dtype, -1, ctx.length)  # (E, N, K)
    x = grouped_mm(grad.contiguous(), weight, offs).to(ctx.dtype)
    has_expert = (torch.arange(len(x), device=x.device).unsqueeze(1) < offs).any(1, keepdim=True)
    return torch.where(has_expert, x, 0), *(None,) * 6  # what others have is undefined


#: operator -> its arguments after the weight, kernel, fake kernel
_OPERATORS: dict[str, tuple[str, Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear_mx": (
        "Tensor? bias, str elem_dtype_name, int block_size, int rotation=0, ScalarType? target_dtype=None",
        _linear,
        _linear_fake,
    ),
    "grouped_linear_mx": (
        "Tensor offs, str elem_dtype_name, int block_size, ScalarType? target_dtype=None",
        _grouped_linear,
        _grouped_linear_fake,
    ),
    "linear_mx_mma_layout": (
        "Tensor? bias, str elem_dtype_name, int n, int rotation=0",
        _linear_mma_layout,
        _linear_mma_layout_fake,
    ),
}

#: the kernels take any strides: without the second tag Inductor copies x for each of the products that share it
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

for _name, (_rest, _kernel, _fake) in _OPERATORS.items():
    torch.library.define(
        f"pt2mx::{_name}", f"(Tensor x, Tensor weight_data, Tensor weight_scale, {_rest}) -> Tensor", tags=_TAGS
    )
    torch.library.impl(f"pt2mx::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"pt2mx::{_name}", _fake)

torch.library.register_autograd("pt2mx::linear_mx", _linear_backward, setup_context=_save_weight)
torch.library.register_autograd("pt2mx::grouped_linear_mx", _grouped_linear_backward, setup_context=_save_experts)

linear_mx = torch.ops.pt2mx.linear_mx.default
grouped_linear_mx = torch.ops.pt2mx.grouped_linear_mx.default
linear_mx_mma_layout = torch.ops.pt2mx.linear_mx_mma_layout.default
register_autocast(linear_mx)
register_autocast(linear_mx_mma_layout, computes_in=torch.bfloat16)
