"""Matmuls with weights in the MMA layout on sm_90, for more rows of x than `gemv_kernel` supports.

x is first copied into the order of the threads. If one program per tile of the output would leave multiprocessors idle,
several programs divide the sums along K (split-K), and a last kernel adds the parts in a fixed order.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu import tuning
from pt2mx.kernels.gpu.device import multiprocessors_of
from pt2mx.kernels.gpu.gemm_kernel import STAGE_K, gemm_kernel, reduce_split_k_kernel, shuffle_x_kernel
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS

_SHARED_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
_MOST_STAGES = 4
_SHARED_BYTES = 3 * 2**16  # of a multiprocessor's shared memory, for stages
#: programs of a multiprocessor -> the shared memory that each takes, so that no multiprocessor gets one more. Programs
#: that start while the kernel before them runs would otherwise gather on the multiprocessors that it leaves first
_BYTES_OF_PROGRAM = {1: 2**17, 2: 3 * 2**15}


def gemm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    tensor_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    element: ElementFormat,
) -> None:
    """x, codes, scale, tensor_scale, bias: as of `gemv_kernel`; writes the result to out: (batch, n)."""
    (batch, n), (n_tiles, k_steps) = out.shape, codes.shape[:2]
    multiprocessors = multiprocessors_of(x.device)
    tile = tuning.gemm_tile(batch, x.shape[1], n_tiles, element, multiprocessors)
    split_steps = triton.cdiv(triton.cdiv(k_steps, 2), tile.split_k) * 2
    split_k = triton.cdiv(k_steps, split_steps)
    # if many rows of programs read a weight that may exceed the L2 cache, they all read the same part at a time
    m_first = element.bits == 8 and batch > 2 * tile.m_rows
    parts = out if split_k == 1 else torch.empty(split_k, batch, n, dtype=torch.float32, device=x.device)
    scales = tuning.scale_fields(scale, tensor_scale)
    of_m, of_n = triton.cdiv(batch, tile.m_rows), triton.cdiv(n_tiles, tile.warps)
    stage_bytes = tile.m_rows * STAGE_K.value * x.element_size()
    stages = min(_MOST_STAGES, _SHARED_BYTES // stage_bytes)
    reserved = _BYTES_OF_PROGRAM.get(triton.cdiv(of_m * of_n * split_k, multiprocessors), 0)
    config = tuning.kernel_config(
        element,
        **scales | {"scales_result": scales["scales_result"] and split_k == 1},
        warps_n=tile.warps,
        m_rows=tile.m_rows,
        stages=stages,
        slots=max(stages, reserved // stage_bytes),
        load_steps=_load_steps(element, tile.m_rows),
        m_first=m_first,
        has_bias=bias is not None and split_k == 1,
        use_pdl=True,
    )
    grid = (of_m, of_n, split_k) if m_first else (of_n, of_m, split_k)
    with torch.cuda.device_of(x):
        shuffled = _shuffled(x, of_m * tile.m_rows, element, 2 * multiprocessors)
        descriptor = TensorDescriptor.from_tensor(shuffled, [tile.m_rows, STAGE_K.value], _SHARED_LAYOUT)
        sizes = batch, n, n_tiles, k_steps, split_steps, tuning.loads_early()
        of_weight = codes, scale, tensor_scale, bias
        gemm_kernel[grid](descriptor, *of_weight, parts, *sizes, config, num_warps=tile.warps, launch_pdl=True)
        if split_k > 1:
            size = batch * n
            config = tuning.kernel_config(element, **scales, has_bias=bias is not None, use_pdl=True)
            reduce_split_k_kernel[(triton.cdiv(size, 2048),)](
                parts, tensor_scale, bias, out, n, size, split_k, config, num_warps=8, launch_pdl=True
            )


def _load_steps(element: ElementFormat, m_rows: int) -> int:
    """Return the steps that are loaded together: the steps of two stages, or of one stage if the words of two do not
    fit in registers."""
    return 1 if element.bits == 8 and m_rows == 256 else 2 * STAGE_K.value // FRAGMENTS[element.name].k_step


def _shuffled(x: Tensor, rows: int, element: ElementFormat, programs: int) -> Tensor:
    """(batch, K) -> (rows, K'), K' in whole steps, by about `programs` programs. The pairs of values of each step are
    interleaved: one pair of each thread in turn.

    Rows from `batch` on are unused; they exist because copies that reach beyond a tensor are slow.
    """
    (batch, k), k_step = x.shape, FRAGMENTS[element.name].k_step
    out = torch.empty(rows, triton.cdiv(k, k_step) * k_step, dtype=x.dtype, device=x.device)
    words, words_out = k // 2, out.shape[1] // 2
    of_words, config = triton.cdiv(words_out, 1024), tuning.kernel_config(element, use_pdl=True)
    grid = of_words, min(batch, triton.cdiv(programs, of_words))
    x_words, out_words = x.view(torch.int32), out.view(torch.int32)
    shuffle_x_kernel[grid](x_words, out_words, batch, words, words_out, config, num_warps=8, launch_pdl=True)
    return out
