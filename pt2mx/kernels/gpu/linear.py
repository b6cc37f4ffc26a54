"""Matmuls with weights in the MMA layout (`mma_layout`) on an NVIDIA GPU.

`gemv_kernel` multiplies a few rows of x, `gemm` more rows; for even more, the weight is dequantized for torch's matmul
(`tuning.kernel_of`). The kernels do not wait for the device, can be captured in a CUDA graph, and return the same bits
in every run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.kernels.gpu import tuning
from pt2mx.kernels.gpu.device import aligned, multiprocessors_of, uses_pdl
from pt2mx.kernels.gpu.fragment import dequantize_kernel
from pt2mx.kernels.gpu.gemm import gemm
from pt2mx.kernels.gpu.gemv_kernel import gemv_kernel
from pt2mx.kernels.gpu.hadamard import rotate
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, ROWS

if TYPE_CHECKING:
    from pt2mx.ops.decoding import NormedLinearMX, ResidualLinearMX
    from pt2mx.ops.linear import LinearMXMMALayout

    _Layer = LinearMXMMALayout[Tensor] | NormedLinearMX[Tensor] | ResidualLinearMX[Tensor]

#: tiles of the weight that are dequantized for one matmul: on an H200 one matmul was faster than several of 4096 rows
#: for nearly all sizes, and than several of 8192 rows for most
_TILES_OF_PART = 1024
_MOST_ROWS = 32  # of x, that `gemv_kernel` multiplies


class Epilogue(NamedTuple):
    """The norm, gate and residual sum that `gemv_kernel` computes. `gemv_epilogue.store` describes the tensors."""

    divides: Tensor | None = None  # squares of x
    eps: float = 0.0
    gate: str | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    weighted: Tensor | None = None
    squares: Tensor | None = None


_PLAIN = Epilogue()


def linear_mma_layout(call: LinearMXMMALayout[Tensor]) -> Tensor:
    x, rows, element = call.x, _rows(call.x), ELEMENTS[call.element]
    (batch, k), n_tiles = rows.shape, len(call.codes)
    rotates = tuning.rotates_in_gemv(batch, k, n_tiles, call.rotation)
    if call.rotation and not rotates:
        rows = rotate(rows, call.rotation)
    out = x.new_empty(batch, call.n)
    is_sm_90 = torch.cuda.get_device_capability(x.device)[0] == 9
    multiprocessors = multiprocessors_of(x.device)
    name = tuning.kernel_of(batch, k, n_tiles, element, multiprocessors, is_sm_90)
    kernel = functools.partial(_gemv, rotates=True) if rotates else _KERNELS[name]
    kernel(rows, *_weight(call), out, element)
    return out.view(*x.shape[:-1], call.n)


def normed_linear(call: NormedLinearMX[Tensor]) -> Tensor | None:
    """Return None for more rows than `gemv_kernel` takes."""
    x, rows, squares = call.x, _rows(call.x), call.squares
    if not 0 < len(rows) <= _MOST_ROWS:
        return None
    out = x.new_empty(len(rows), call.n if call.gate is None else call.n // 2)
    epilogue = Epilogue(None if squares is None else _rows(squares), call.eps, call.gate)
    _gemv(rows, *_weight(call), out, ELEMENTS[call.element], epilogue=epilogue)
    return out.view(*x.shape[:-1], -1)


def residual_linear(call: ResidualLinearMX[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return None for more rows than `gemv_kernel` takes."""
    x, rows = call.x, _rows(call.x)
    if not 0 < len(rows) <= _MOST_ROWS:
        return None
    total, weighted = (x.new_empty(len(rows), call.n) for _ in range(2))
    squares = x.new_empty(len(rows), len(call.codes), dtype=torch.float32)
    residual, norm_weight = _rows(call.residual), call.norm_weight.contiguous()
    epilogue = Epilogue(residual=residual, norm_weight=norm_weight, weighted=weighted, squares=squares)
    _gemv(rows, *_weight(call), total, ELEMENTS[call.element], epilogue=epilogue)
    shape = x.shape[:-1]
    return total.view(*shape, -1), weighted.view(*shape, -1), squares.view(*shape, -1)


def _weight(call: _Layer) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return codes, scales, tensor scale and bias of a layer, as the kernels read them."""
    return call.codes, _in_words(call.scale), call.tensor_scale, call.bias


def _rows(x: Tensor) -> Tensor:
    """(..., K) -> (rows, K), aligned."""
    return aligned(x.reshape(-1, x.shape[-1]))


def _in_words(scale: Tensor) -> Tensor:
    """Return scales as the kernels read them: two of a byte with a significand as an int16."""
    return scale.view(torch.int16).squeeze(5) if scale.dim() == 6 else scale


def _gemv(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    tensor_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    element: ElementFormat,
    rotates: bool = False,
    epilogue: Epilogue = _PLAIN,
) -> None:
    (batch, k), (n_tiles, k_steps) = x.shape, codes.shape[:2]
    multiprocessors = multiprocessors_of(x.device)
    chosen = tuning.gemv_config(batch, k, n_tiles, element, multiprocessors)
    # with more rows of x, the programs of two kernels would share the multiprocessors badly
    use_pdl = chosen.m_tiles <= 2 and uses_pdl(x.device)
    config = tuning.kernel_config(
        element,
        **tuning.scale_fields(scale, tensor_scale),
        **chosen._asdict(),
        has_bias=bias is not None,
        whole_k=k % (FRAGMENTS[element.name].k_step * chosen.warps_k * chosen.k_unroll) == 0,
        use_pdl=use_pdl,
        rotates=rotates,
        divides=epilogue.divides is not None,
        gate=epilogue.gate,
        adds_residual=epilogue.residual is not None,
    )
    n = out.shape[1] if epilogue.gate is None else 2 * out.shape[1]
    sizes = batch, n, k, n_tiles, k_steps, tuning.loads_early()
    grid = (triton.cdiv(n_tiles, chosen.tiles_per_warp),)
    with torch.cuda.device_of(x):
        of_weight = codes, scale, tensor_scale, bias
        others = epilogue.eps, epilogue.residual, epilogue.norm_weight, epilogue.weighted, epilogue.squares
        options = {"num_warps": chosen.warps_k, "launch_pdl": use_pdl, "maxnreg": tuning.max_registers(chosen, element)}
        gemv_kernel[grid](x, *of_weight, epilogue.divides, others, out, *sizes, config, **options)


def _dequantize_then_matmul(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    tensor_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    element: ElementFormat,
) -> None:
    n = out.shape[1]
    for first in range(0, len(codes), _TILES_OF_PART):
        part = slice(first, first + _TILES_OF_PART)
        rows = slice(ROWS * first, min(ROWS * part.stop, n))
        weight = _dequantize(codes[part], scale[part], tensor_scale, element, rows.stop - rows.start, x.shape[1])
        if bias is None:
            torch.mm(x, weight.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, weight.t(), out=out[:, rows])


_KERNELS = {"gemv": _gemv, "gemm": gemm, "dequantize": _dequantize_then_matmul}


def dequantize(
    codes: Tensor, scale: Tensor, element: ElementFormat, n: int, k: int, tensor_scale: Tensor | None = None
) -> Tensor:
    """codes, scale: whole tiles in the MMA layout -> (n, k) bfloat16."""
    return _dequantize(codes, _in_words(scale), tensor_scale, element, n, k)


def _dequantize(
    codes: Tensor, scale: Tensor, tensor_scale: Tensor | None, element: ElementFormat, n: int, k: int
) -> Tensor:
    out = torch.empty(n, k, dtype=torch.bfloat16, device=codes.device)
    n_tiles, k_steps = codes.shape[:2]
    config = tuning.kernel_config(element, **tuning.scale_fields(scale, tensor_scale), warps_k=4)
    with torch.cuda.device_of(codes):
        grid = (triton.cdiv(k_steps, 4), n_tiles)
        dequantize_kernel[grid](codes, scale, tensor_scale, out, n, k, k_steps, config, num_warps=4)
    return out
