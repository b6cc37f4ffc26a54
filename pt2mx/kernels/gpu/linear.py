"""Matmuls with weights in the MMA layout (`mma_layout`) on an NVIDIA GPU.

`gemv_kernel` multiplies a few rows of x, `gemm` more rows; for even more, the weight is dequantized for torch's matmul
(`tuning.kernel_of`). The kernels do not wait for the device, can be captured in a CUDA graph, and return the same bits
in every run.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu import tuning
from pt2mx.kernels.gpu.fragment import dequantize_kernel
from pt2mx.kernels.gpu.gemm import gemm
from pt2mx.kernels.gpu.gemv_kernel import gemv_kernel
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, ROWS
from pt2mx.kernels.select import run_kernel

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
    rows = _rows(x)
    (batch, k), n_tiles = rows.shape, len(codes)
    rotates = tuning.rotates_in_gemv(batch, k, n_tiles, rotation)
    if rotation and not rotates:
        rows = run_kernel("hadamard", rows, rotation)
    out = x.new_empty(batch, n)
    is_sm_90 = torch.cuda.get_device_capability(x.device)[0] == 9
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    name = tuning.kernel_of(batch, k, n_tiles, element, multiprocessors, is_sm_90)
    kernel = functools.partial(_gemv, rotates=True) if rotates else _KERNELS[name]
    kernel(rows, codes, _in_words(scale), tensor_scale, bias, out, element)
    return out.view(*x.shape[:-1], n)


def normed_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    element: ElementFormat,
    n: int,
    squares: Tensor | None,
    eps: float,
    gate: str | None,
    tensor_scale: Tensor | None = None,
) -> Tensor | None:
    """Return None for more rows than `gemv_kernel` takes."""
    rows = _rows(x)
    if not 0 < len(rows) <= _MOST_ROWS:
        return None
    out = x.new_empty(len(rows), n if gate is None else n // 2)
    epilogue = Epilogue(None if squares is None else _rows(squares), eps, gate)
    _gemv(rows, codes, _in_words(scale), tensor_scale, bias, out, element, epilogue=epilogue)
    return out.view(*x.shape[:-1], -1)


def residual_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    element: ElementFormat,
    n: int,
    residual: Tensor,
    norm_weight: Tensor,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return None for more rows than `gemv_kernel` takes."""
    rows = _rows(x)
    if not 0 < len(rows) <= _MOST_ROWS:
        return None
    total, weighted = (x.new_empty(len(rows), n) for _ in range(2))
    squares = x.new_empty(len(rows), len(codes), dtype=torch.float32)
    epilogue = Epilogue(
        residual=_rows(residual), norm_weight=norm_weight.contiguous(), weighted=weighted, squares=squares
    )
    _gemv(rows, codes, _in_words(scale), tensor_scale, bias, total, element, epilogue=epilogue)
    shape = x.shape[:-1]
    return total.view(*shape, -1), weighted.view(*shape, -1), squares.view(*shape, -1)


def aligned(x: Tensor, size: int = 16) -> Tensor:
    """Return the same values, contiguous and aligned, since kernels read up to `size` bytes at a time."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % size else x


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
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    chosen = tuning.gemv_config(batch, k, n_tiles, element, multiprocessors)
    # with more rows of x, the programs of two kernels would share the multiprocessors badly
    use_pdl = chosen.m_tiles <= 2 and torch.cuda.get_device_capability(x.device)[0] >= 9
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
