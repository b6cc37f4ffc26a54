"""`torch.ops.pt2mx.linear_mx_mma_layout`: `linear_mx` with the weight in the order of a GPU's tensor cores.

What lowering puts in the place of `linear_mx` on a GPU (`pt2mx.fx.passes.mma_layout`), where the codes can be reordered
once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.errors import MXError
from pt2mx.formats import ELEMENTS
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, from_mma_layout
from pt2mx.ops.autocast import register_autocast
from pt2mx.ops.kernels import runs_triton


def _linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, elem: str, n: int) -> Tensor:
    """x: (..., K) bfloat16, data and scale as `pt2mx.kernels.gpu.mma_layout.to_mma_layout` gives them, bias: (n,)
    bfloat16 or None -> (..., n) bfloat16: the product with fp32 sums."""
    _check(x, data, scale, bias, elem, n)
    if x.device.type == "cuda" and runs_triton(x.device):
        from pt2mx.kernels.gpu import linear as gpu_linear

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return gpu_linear.linear(rows, data, scale, bias, ELEMENTS[elem], n).view(*x.shape[:-1], n)
    return F.linear(x, from_mma_layout(data, scale, ELEMENTS[elem], n, x.shape[-1]), bias)


def _linear_fake(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, elem: str, n: int) -> Tensor:
    _check(x, data, scale, bias, elem, n)
    return x.new_empty((*x.shape[:-1], n))


def _check(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, elem: str, n: int) -> None:
    if elem not in FRAGMENTS:
        raise MXError(f"no MMA layout of {elem!r}: allowed are {', '.join(FRAGMENTS)}")
    if x.dtype != torch.bfloat16 or not x.dim() or (bias is not None and bias.dtype != torch.bfloat16):
        raise MXError(f"weights in the MMA layout take bfloat16 x and bias of at least one dimension, not {x.dtype}")
    if x.shape[-1] % 8:
        raise MXError(f"the MMA layout is of a K that 8 divides, not {x.shape[-1]}: use linear_mx")
    fragment, steps = FRAGMENTS[elem], -(-x.shape[-1] // FRAGMENTS[elem].k_step)
    shapes = (-(-n // 16), steps, 2, fragment.words // 4, 32, 16), (-(-n // 16), steps, 2, fragment.scales, 32)
    if (tuple(data.shape), tuple(scale.shape)) != shapes or not (data.dtype == scale.dtype == torch.uint8):
        raise MXError(
            f"data {tuple(data.shape)} and scale {tuple(scale.shape)} are no MMA layout of a ({n}, {x.shape[-1]}) "
            f"weight of {elem}: those are {shapes[0]} and {shapes[1]} uint8"
        )


_SCHEMA = "(Tensor x, Tensor weight_data, Tensor weight_scale, Tensor? bias, str elem_dtype_name, int n) -> Tensor"
torch.library.define(
    "pt2mx::linear_mx_mma_layout", _SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
)
torch.library.impl("pt2mx::linear_mx_mma_layout", "CompositeExplicitAutograd", _linear)
torch.library.register_fake("pt2mx::linear_mx_mma_layout", _linear_fake)

linear_mx_mma_layout = torch.ops.pt2mx.linear_mx_mma_layout.default
register_autocast(linear_mx_mma_layout, computes_in=torch.bfloat16)
