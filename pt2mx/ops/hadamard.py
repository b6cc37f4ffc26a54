"""`torch.ops.pt2mx.hadamard`: values rotated within blocks, so that outliers are shared out among their neighbours.

Source: the fast Walsh-Hadamard transform; QuaRot (Ashkboos et al., arXiv:2404.00456) rotates whole rows. A product
stays what it is if both of its factors are rotated along the dimension that it reduces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx.kernels.hadamard import rotate_back
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.checks import check_rotation


def _hadamard(x: Tensor, size: int, axis: int = -1) -> Tensor:
    check_rotation(x, size, axis)
    return run_kernel("hadamard", x, size, axis)


def _hadamard_fake(x: Tensor, size: int, axis: int = -1) -> Tensor:
    check_rotation(x, size, axis)
    return x.new_empty(x.shape)


def _save_arguments(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.size, ctx.axis = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return rotate_back(grad, ctx.size, ctx.axis), None, None


torch.library.define(
    "pt2mx::hadamard", "(Tensor x, int size, int axis=-1) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
torch.library.impl("pt2mx::hadamard", "CompositeExplicitAutograd", _hadamard)
torch.library.register_fake("pt2mx::hadamard", _hadamard_fake)
torch.library.register_autograd("pt2mx::hadamard", _backward, setup_context=_save_arguments)

hadamard = torch.ops.pt2mx.hadamard.default
