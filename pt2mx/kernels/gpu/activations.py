"""Activations and layer norms with fused quantization on NVIDIA GPUs: one pass over memory, two bfloat16 values per
instruction.

The kernels do not wait for the device and can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.kernels.constants import BLOCK, supports_bf16x2
from pt2mx.kernels.gpu.activations_kernel import Norm, fake_quantize_activation_kernel
from pt2mx.kernels.gpu.device import aligned, uses_pdl
from pt2mx.kernels.gpu.quantize import Tile, constants_of
from pt2mx.kernels.gpu.tiles import Constants
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.activations import ActivationFakeQuantize, LayerNormFakeQuantize

#: whether a kernel makes FP8 rows -> values per program and per thread, the fastest on an H200. A longer row gets its
#: own program
_VALUES = {True: (1024, 32), False: (2048, 16)}


_NO_NORM = Norm()


@dataclass(frozen=True)
class Config:
    """The compile-time values of the kernels that quantize what they compute."""

    rows: int  # of a program
    blocks: int  # of a row, a power of two
    whole: bool  # True if a row has as many
    pdl: bool
    norm: bool
    has_residual: bool
    has_weight: bool
    has_bias: bool
    activation: str = "none"
    shift: int = 0  # both of `fp8_rowwise.Room`
    spread: int = 0


def supports(spec: MXSpec, x: Tensor, *of_norm: Tensor | None) -> bool:
    """Return whether the kernels can quantize along the last dimension of x, and read the tensors of a norm."""
    dtypes = (t.dtype for t in (x, *of_norm) if t is not None)
    return x.dim() > 0 and supports_bf16x2(spec, x.shape[-1], *dtypes)


def activation_fake_quantize(call: ActivationFakeQuantize[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor | None:
    x = call.x
    if not supports(spec, x) or dtype != x.dtype:
        return None
    out = x.new_empty(x.shape)
    launch(fake_quantize_activation_kernel, x.reshape(-1, BLOCK), (out,), spec, activation=call.activation)
    return out


def layer_norm_fake_quantize(
    call: LayerNormFakeQuantize[Tensor], spec: MXSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    x, of_norm = call.x, (call.residual, call.weight, call.bias)
    if not supports(spec, x, *of_norm) or dtype != x.dtype:
        return None
    normed, out = x.new_empty(x.shape), x.new_empty(x.shape)
    launch(fake_quantize_activation_kernel, x, (out,), spec, Norm(normed, *of_norm, call.eps))
    return normed, out


def launch(
    kernel: triton.JITFunction,
    x: Tensor,
    outputs: tuple[Tensor, ...],
    spec: MXSpec,
    norm: Norm = _NO_NORM,
    **compile_time: Any,
) -> None:
    """Run `kernel` on the rows of x."""
    if not x.numel():
        return
    k = x.shape[-1]
    present = tuple(t is not None for t in norm[:4])
    plan, rows = _plan(spec, k, x.device, present, **compile_time), x.numel() // k
    residual, weight, bias = (None if t is None else aligned(t, 4) for t in norm[1:4])
    norm = Norm(norm.out, residual, weight, bias, norm.eps)
    with torch.cuda.device_of(x):
        kernel[(-(-rows // plan.config.rows),)](
            *(aligned(x, 4), norm, *outputs, k, rows, plan.constants, plan.config),
            num_warps=plan.warps,
            launch_pdl=plan.config.pdl,
        )


class _Plan(NamedTuple):
    config: Config
    constants: Constants
    warps: int


@functools.lru_cache(maxsize=4096)
def _plan(spec: MXSpec, k: int, device: torch.device, present: tuple[bool, ...], **compile_time: Any) -> _Plan:
    """Return how programs divide rows of k values; cached, because computing it takes longer than the kernel."""
    blocks = triton.next_power_of_2(k // BLOCK)
    of_program, of_thread = _VALUES["shift" in compile_time]
    rows = max(1, of_program // (BLOCK * blocks))
    flags = dict(zip(("norm", "has_residual", "has_weight", "has_bias"), present, strict=True))
    config = Config(rows, blocks, k == BLOCK * blocks, uses_pdl(device), **(flags | compile_time))
    values = BLOCK * blocks * rows
    warps = min(16, max(1, values // (32 * of_thread)))
    return _Plan(config, constants_of(spec, (1, 1), BLOCK, 1, False, Tile(values, 1)), warps)
