"""`torch.ops.pt2mx.rotated_fake_quantize_mx`: `fake_quantize_mx` of `hadamard`, to the bit, in one pass over memory.

The lowered program calls it (`pt2mx.fx.passes.fuse_rotation`), also where nothing is rotated and the values go to a
product in bfloat16 (`pt2mx.fx.passes.bf16_matmul`). Inductor keeps it a call: a sum of 32 neighbours in one order
is nothing that it could fuse, and of the quantization alone it makes slower code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.hadamard import rotate_back
from pt2mx.kernels.select import run_kernel
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.checks import HIGH_PRECISION, check_input, check_rotation
from pt2mx.spec import MXSpec


def _rotated_fake_quantize(x: Tensor, size: int, *modes: Any) -> Tensor:
    spec, dtype = _check(x, size, *modes)
    result = run_kernel("rotated_fake_quantize_mx", x, size, spec, dtype)
    if result is not None:
        return result
    return run_kernel("fake_quantize_mx", run_kernel("hadamard", x, size), spec, None).to(dtype)


def _rotated_fake_quantize_fake(x: Tensor, size: int, *modes: Any) -> Tensor:
    _, dtype = _check(x, size, *modes)
    return x.new_empty(x.shape, dtype=dtype)


def _check(
    x: Tensor,
    size: int,
    elem: str,
    block_size: int,
    scale_mode: str = "floor",
    rounding: str = "even",
    target_dtype: torch.dtype | None = None,
) -> tuple[MXSpec, torch.dtype]:
    check_rotation(x, size)
    spec = check_input(x, elem, block_size, -1, scale_mode, rounding)
    if ROUNDINGS[rounding].random:
        raise MXError(f"rotated values are not rounded {rounding!r} at once: use hadamard and fake_quantize_mx")
    dtype = target_dtype or x.dtype
    if dtype not in HIGH_PRECISION:
        raise MXError(f"target_dtype={dtype} must be float32, float16 or bfloat16, or None for that of x")
    return spec, dtype


def _save_size(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.size, ctx.dtype = inputs[1], inputs[0].dtype


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (rotate_back(grad, ctx.size).to(ctx.dtype),) + (None,) * 6


torch.library.define(
    "pt2mx::rotated_fake_quantize_mx",
    '(Tensor x, int size, str elem_dtype_name, int block_size, str scale_mode="floor", str rounding="even", '
    "ScalarType? target_dtype=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),  # kernels take any strides
)
torch.library.impl("pt2mx::rotated_fake_quantize_mx", "CompositeExplicitAutograd", _rotated_fake_quantize)
torch.library.register_fake("pt2mx::rotated_fake_quantize_mx", _rotated_fake_quantize_fake)
torch.library.register_autograd("pt2mx::rotated_fake_quantize_mx", _straight_through, setup_context=_save_size)

rotated_fake_quantize_mx = torch.ops.pt2mx.rotated_fake_quantize_mx.default
