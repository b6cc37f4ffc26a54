"""The compile-time configuration of the kernels that read the MMA layout."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu.mma_decode import decode_ptx
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, exponent_shift


class KernelConfig(NamedTuple):
    """The compile-time values of a kernel: those of its element, and those of a launch."""

    ptx: str  # of `mma_decode.decode_ptx`
    vectors: int  # of 4 words that a thread decodes at a time
    scales: int  # that they have
    k8_groups: int  # groups of 8 values along K that they give
    exponent_shift: int  # added to a scale to give that of the pairs
    warps_k: int = 1  # warps that share a tile of the output
    warps_n: int = 1
    tiles_per_warp: int = 1  # of 16 rows of the weight
    k_unroll: int = 1  # steps along K that are loaded together
    m_tiles: int = 0  # GEMV: tiles of 8 rows of x
    m_rows: int = 0  # GEMM: rows of x that a program multiplies
    stages: int = 0  # GEMM: of the ring in shared memory
    load_steps: int = 0  # GEMM: steps along K that are loaded together, of one stage or two
    m_first: bool = False  # GEMM: neighbouring programs have the same rows of the weight, and else those of x
    has_bias: bool = False
    whole_k: bool = True  # K is a multiple of what a program takes at a time
    use_pdl: bool = False
    rotates: bool = False  # GEMV: x is rotated first


@functools.lru_cache(maxsize=1024)
def kernel_config(element: ElementFormat, **of_launch: Any) -> KernelConfig:
    """Return the config of a kernel for weights of `element`, with the fields `of_launch`."""
    fragment = FRAGMENTS[element.name]
    return KernelConfig(
        ptx=decode_ptx(element),
        vectors=fragment.words // 4,
        scales=fragment.scales,
        k8_groups=fragment.values // 8,
        exponent_shift=exponent_shift(element),
        **of_launch,
    )
