"""`torch.ops.pt2mx.quantize_fp8_rows`, `layer_norm_fp8_rows`, `mm_fp8_rows`: products of quantized activations and
weights on tensor cores for FP8, exactly.

What FP8 rows are says `pt2mx.kernels.fp8_rowwise`, which defines the operators on every device; on an NVIDIA GPU
`pt2mx.kernels.gpu.fp8_rowwise` runs. Lowered programs call them (`pt2mx.fx.passes.fp8_rowwise`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS, ROOMS
from pt2mx.kernels.select import run_kernel
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.checks import HIGH_PRECISION, check_input
from pt2mx.spec import MXSpec


def _quantize(x: Tensor, *modes: str) -> tuple[Tensor, Tensor, Tensor]:
    spec, activation = _check(x, *modes)
    return run_kernel("quantize_fp8_rows", x, spec, activation)


def _quantize_fake(x: Tensor, *modes: str) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, *modes)
    return _rows_like(x)


def _layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *modes: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = _check_layer_norm(x, residual, weight, bias, *modes)
    return run_kernel("layer_norm_fp8_rows", x, residual, weight, bias, eps, spec)


def _layer_norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *modes: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_layer_norm(x, residual, weight, bias, *modes)
    return x.new_empty(x.shape), *_rows_like(x)


def _mm(
    data: Tensor, scale: Tensor, rest: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    _check_mm(data, scale, rest, weight, weight_scale, bias)
    return run_kernel("mm_fp8_rows", data, scale, rest, weight, weight_scale, bias)


def _mm_fake(
    data: Tensor, scale: Tensor, rest: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    _check_mm(data, scale, rest, weight, weight_scale, bias)
    return rest.new_empty((*data.shape[:-1], weight.shape[0]))


def _rows_like(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), x.new_empty(x.shape)


def _check(
    x: Tensor, elem: str, scale_mode: str = "floor", rounding: str = "even", activation: str = "none"
) -> tuple[MXSpec, str]:
    if elem not in ROOMS:
        raise MXError(f"{elem!r} leaves no room for scales in E4M3: allowed are {', '.join(ROOMS)}")
    if activation not in ACTIVATIONS:
        raise MXError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    spec = check_input(x, elem, BLOCK, -1, scale_mode, rounding)
    if ROUNDINGS[rounding].random:
        raise MXError(f"FP8 rows are not rounded {rounding!r}: use fake_quantize_mx")
    if not x.dim() or x.shape[-1] % BLOCK or not x.shape[-1]:
        raise MXError(f"FP8 rows are of whole blocks of {BLOCK} values; got x of shape {tuple(x.shape)}")
    return spec, activation


def _check_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *modes: str
) -> MXSpec:
    spec, _ = _check(x, *modes)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise MXError(
            f"the residual {tuple(residual.shape)} {residual.dtype} must have the shape and the dtype of x, "
            f"{tuple(x.shape)} {x.dtype}"
        )
    for name, of_norm in (("weight", weight), ("bias", bias)):
        if of_norm is not None and of_norm.shape != x.shape[-1:]:
            raise MXError(f"{name} of shape {tuple(of_norm.shape)} must be ({x.shape[-1]},), one of each column of x")
        if of_norm is not None and of_norm.dtype not in (x.dtype, torch.float32):
            raise MXError(f"{name} of {of_norm.dtype} must be in x's dtype, {x.dtype}, or float32: cast it")
    return spec


def _check_mm(
    data: Tensor, scale: Tensor, rest: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> None:
    if any(t.dtype != torch.uint8 for t in (data, weight)) or any(
        t.dtype != torch.float32 for t in (scale, weight_scale)
    ):
        raise MXError(
            f"FP8 rows are uint8 codes and float32 scales, not {data.dtype} and {scale.dtype}, and a weight of "
            f"{weight.dtype} and {weight_scale.dtype}"
        )
    if not data.dim() or data.shape != rest.shape or scale.shape != (*data.shape[:-1], 1):
        raise MXError(
            f"codes {tuple(data.shape)}, scale {tuple(scale.shape)} and rest {tuple(rest.shape)} are no FP8 rows: pass "
            "what quantize_fp8_rows returned"
        )
    if rest.dtype not in HIGH_PRECISION:
        raise MXError(f"rest of {rest.dtype} must be float32, float16 or bfloat16")
    if weight.dim() != 2 or weight.shape[1] != data.shape[-1] or weight_scale.shape != (weight.shape[0], 1):
        raise MXError(
            f"a weight {tuple(weight.shape)} with scales {tuple(weight_scale.shape)} does not fit rows of "
            f"{data.shape[-1]} values: expected (N, {data.shape[-1]}) and (N, 1)"
        )
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        raise MXError(f"tensor cores for FP8 take weights of multiples of 16 rows and columns, not {(*weight.shape,)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != rest.dtype):
        raise MXError(f"bias {tuple(bias.shape)} {bias.dtype} must be ({weight.shape[0]},) in {rest.dtype}")


def _refuse_gradient(ctx: Any, *grads: Tensor) -> None:
    raise MXError("no gradient passes FP8 rows: lower the model with unpack=False")


_MODES = 'str elem_dtype_name, str scale_mode="floor", str rounding="even"'
_ROWS = "Tensor data, Tensor scale, Tensor rest"

#: operator -> its schema, kernel, fake kernel
_OPERATORS: dict[str, tuple[str, Any, Any]] = {
    "quantize_fp8_rows": (f'(Tensor x, {_MODES}, str activation="none") -> ({_ROWS})', _quantize, _quantize_fake),
    "layer_norm_fp8_rows": (
        f"(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, {_MODES}) -> (Tensor normed, {_ROWS})",
        _layer_norm,
        _layer_norm_fake,
    ),
    "mm_fp8_rows": (f"({_ROWS}, Tensor weight_data, Tensor weight_scale, Tensor? bias=None) -> Tensor", _mm, _mm_fake),
}

for _name, (_schema, _kernel, _fake) in _OPERATORS.items():
    torch.library.define(f"pt2mx::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    torch.library.impl(f"pt2mx::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"pt2mx::{_name}", _fake)
    torch.library.register_autograd(f"pt2mx::{_name}", _refuse_gradient)

quantize_fp8_rows = torch.ops.pt2mx.quantize_fp8_rows.default
layer_norm_fp8_rows = torch.ops.pt2mx.layer_norm_fp8_rows.default
mm_fp8_rows = torch.ops.pt2mx.mm_fp8_rows.default
