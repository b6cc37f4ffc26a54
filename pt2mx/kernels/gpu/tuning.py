"""Choose a kernel for a weight in the MMA layout, and its configuration: pure functions of sizes, from measurements on
an NVIDIA H200.

`python -m tests.benchmarks.linear` measures the chosen kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu.mma_decode import decode_ptx
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, exponent_shift, float_scale_offset


class GemvConfig(NamedTuple):
    """The work of a program of `gemv_kernel`: tiles of 16 rows a warp, steps along K that are loaded together, warps
    that share a tile along K, tiles of 8 rows of x, and sums of a tile that are computed at the same time."""

    tiles_per_warp: int
    k_unroll: int
    warps_k: int
    m_tiles: int
    chains: int


class GemmTile(NamedTuple):
    """The work of a program of `gemm_kernel`: rows of x, with the 16 rows of the weight of each warp; the sums
    along K are split into `split_k` parts."""

    m_rows: int
    warps: int
    split_k: int


#: rows of x up to which `gemv_kernel` runs on GPUs other than sm_90, which have no `gemm_kernel`
_GEMV_BATCH_WITHOUT_GEMM = 32
#: bits of an element -> the most rows of x that `gemm_kernel` multiplies
_LARGEST_GEMM_BATCH = {4: 1536, 6: 1536, 8: 1024}

#: (bits of an element, at most so many tiles of 8 rows of x) -> tiles_per_warp, k_unroll, the target number of warps
#: per multiprocessor, and chains
_GEMV = {
    (4, 1): (1, 2, 12, 2),
    (6, 1): (1, 1, 12, 1),
    (8, 1): (1, 1, 12, 1),
    (4, 2): (2, 1, 6, 4),
    (6, 2): (2, 1, 6, 1),
    (8, 2): (2, 2, 6, 1),
    (4, 4): (2, 1, 6, 1),
    (6, 4): (2, 1, 6, 1),
    (8, 4): (2, 1, 6, 1),
}
#: the same for many tiles of the weight and up to 8 rows of x
_GEMV_OF_MANY_TILES = {4: (2, 1, 12, 2), 6: (2, 1, 12, 2), 8: (2, 1, 12, 1)}
#: bits of an element -> if 4 warps share a tile of rows, and a row has at most so many values per warp, up to 512
#: values are loaded at a time
_FEW_VALUES = {4: 512, 6: 1024, 8: 1024}
_MOST_SPLITS = 8  # more splits cost as much as they gain
_LONG_SPLIT = 2048  # values along K of a split that is worth a second program on a multiprocessor
#: largest weight, in values along K times tiles of 16 rows, for which `gemv_kernel` rotates x itself. That took 0.3
#: microseconds more for 8192 x 2048 and 1.8 for 2048 x 16384; a separate launch takes 0.8
_LARGEST_ROTATED_GEMV = 1 << 20
#: values that `gemv_kernel` rotates together
ROTATED_BLOCK = 32


def kernel_of(batch: int, k: int, n_tiles: int, element: ElementFormat, multiprocessors: int, is_sm_90: bool) -> str:
    """Return "gemv", "gemm" or "dequantize" (then torch's matmul) for `batch` rows of x."""
    if not batch:
        return "dequantize"
    if not is_sm_90:
        return "gemv" if batch <= _GEMV_BATCH_WITHOUT_GEMM else "dequantize"
    if batch <= _largest_gemv_batch(k, n_tiles, element, multiprocessors):
        return "gemv"
    return "gemm" if batch <= _LARGEST_GEMM_BATCH[element.bits] else "dequantize"


def _largest_gemv_batch(k: int, n_tiles: int, element: ElementFormat, multiprocessors: int) -> int:
    """Return 16 if rows are short, or if programs of `gemv_kernel`, two at a time, leave few multiprocessors idle; else
    8. It is 8 for 6-bit elements."""
    programs, at_once = -(-n_tiles // _GEMV[element.bits, 2][0]), 2 * multiprocessors
    waves = -(-programs // at_once)
    fills = programs >= 0.7 * waves * at_once and (waves == 1 or element.bits == 8)
    return 16 if element.bits != 6 and (k <= 2048 or fills) else 8


def gemv_config(batch: int, k: int, n_tiles: int, element: ElementFormat, multiprocessors: int) -> GemvConfig:
    """Return the configuration of `gemv_kernel` for (batch, k) times the (n_tiles * 16, k) weight."""
    m_tiles = _next_power_of_2(-(-batch // 8))
    tiles_per_warp, k_unroll, warps, chains = _GEMV[element.bits, m_tiles]
    if m_tiles == 1 and n_tiles >= 12 * multiprocessors:
        tiles_per_warp, k_unroll, warps, chains = _GEMV_OF_MANY_TILES[element.bits]
    programs, warps_k = -(-n_tiles // tiles_per_warp), 2
    while programs * warps_k < warps * multiprocessors and (warps_k < 4 or 1024 * 2 * warps_k <= k):
        warps_k *= 2  # stop at 1024 values of a row per warp
    k_step = FRAGMENTS[element.name].k_step
    steps_of_warp = max(1, -(-k // (k_step * warps_k)))
    if tiles_per_warp == 1 and warps_k == 4 and k_step * steps_of_warp <= _FEW_VALUES[element.bits]:
        k_unroll = min(512 // k_step, _next_power_of_2(steps_of_warp))
    if m_tiles == 1 and programs * warps_k <= warps * multiprocessors:
        chains *= 2  # with the registers of idle warps
    return GemvConfig(tiles_per_warp, k_unroll, warps_k, m_tiles, chains)


def max_registers(config: GemvConfig, element: ElementFormat) -> int | None:
    """Return the registers of a thread of `gemv_kernel`, None for no limit: for INT8 the compiler would take 133, so
    that a multiprocessor runs fewer programs."""
    return 128 if element.bits == 8 and config.tiles_per_warp == 2 and config.m_tiles == 1 else None


def rotates_in_gemv(batch: int, k: int, n_tiles: int, rotation: int) -> bool:
    """Return whether `gemv_kernel` rotates x itself. Each of its programs repeats the rotation, so for many programs a
    separate launch takes less time."""
    return rotation == ROTATED_BLOCK and batch == 1 and k * n_tiles <= _LARGEST_ROTATED_GEMV


def gemm_tile(batch: int, k: int, n_tiles: int, element: ElementFormat, multiprocessors: int) -> GemmTile:
    """Return the tile of `gemm_kernel` that leaves few multiprocessors idle. Where registers and shared memory allow,
    two programs share a multiprocessor: while one waits, the other one decodes."""

    def programs(rows: int, warps: int) -> int:
        return -(-n_tiles // warps) * -(-batch // rows)

    def waves(rows: int, warps: int) -> int:
        return -(-programs(rows, warps) // multiprocessors) * warps

    rows, enough = min(max(_next_power_of_2(batch), 16), 256), 0.9 * multiprocessors
    if rows == 256 and programs(rows, 4) < enough:
        rows = 128
    takes_8 = {128: element.bits < 8 and waves(rows, 8) <= waves(rows, 4)}
    takes_8[256] = element.bits == 8 and programs(rows, 8) >= enough
    warps = 8 if takes_8.get(rows) else 4
    split_k = multiprocessors // programs(rows, warps)
    if rows <= 32 or (rows == 64 and element.bits < 8):
        split_k = max(split_k, min(round(2 * multiprocessors / programs(rows, warps)), k // _LONG_SPLIT))
    return GemmTile(rows, warps, min(max(1, split_k), _MOST_SPLITS))


def loads_early() -> int:
    """Return 1 if a kernel may load its weight before the kernels before it end. In a CUDA graph none of them writes
    weights, because a graph cannot contain `to_mma_layout`, which waits for the device."""
    return int(torch.cuda.is_current_stream_capturing())


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class KernelConfig(NamedTuple):
    """The compile-time values of a kernel: for its element, and for a launch."""

    ptx: str  # of `mma_decode.decode_ptx`
    vectors: int  # of 4 words that a thread decodes at a time
    scales: int  # that they have, or pairs of scales with a significand
    k8_groups: int  # groups of 8 values along K that they give
    exponent_shift: int  # added to a scale to give the scale of the pairs
    scale_offset: int  # the same for a scale with a significand
    has_significand: bool = False
    warps_k: int = 1  # warps that share a tile of the output
    warps_n: int = 1
    tiles_per_warp: int = 1  # of 16 rows of the weight
    k_unroll: int = 1  # steps along K that are loaded together
    m_tiles: int = 0  # GEMV: tiles of 8 rows of x
    chains: int = 1  # GEMV: sums of a tile that are computed at the same time
    m_rows: int = 0  # GEMM: rows of x that a program multiplies
    stages: int = 0  # GEMM: of the ring in shared memory
    slots: int = 0  # GEMM: stages that fit into the shared memory of a program
    load_steps: int = 0  # GEMM: steps along K that are loaded together, of one stage or two
    m_first: bool = False  # GEMM: neighbouring programs share rows of the weight, otherwise rows of x
    has_bias: bool = False
    has_tensor_scale: bool = False
    scales_result: bool = False  # scales with a significand: this kernel multiplies by what they lack
    whole_k: bool = True  # K is a multiple of what a program takes at a time
    use_pdl: bool = False
    rotates: bool = False  # GEMV: x is rotated first
    divides: bool = False  # GEMV: the result is divided by the root mean square of x
    gate: str | None = None  # GEMV: of `decoder_linear.GATES`
    adds_residual: bool = False  # GEMV: and stores what the next norm needs

    @property
    def scales_of_word(self) -> int:
        return 2 if self.has_significand else 1


@functools.lru_cache(maxsize=1024)
def kernel_config(element: ElementFormat, has_significand: bool = False, **of_launch: Any) -> KernelConfig:
    """Return the config of a kernel for weights of `element`, with the fields `of_launch`."""
    fragment = FRAGMENTS[element.name]
    return KernelConfig(
        ptx=decode_ptx(element, 2 if has_significand else 1),
        vectors=fragment.words // 4,
        scales=fragment.scales,
        k8_groups=fragment.values // 8,
        exponent_shift=exponent_shift(element),
        scale_offset=float_scale_offset(element),
        has_significand=has_significand,
        **of_launch,
    )


def scale_fields(scale: Tensor, tensor_scale: Tensor | None) -> dict[str, bool]:
    """Return the fields of a config that a weight's scales decide: int16 are pairs of scales with a significand."""
    pairs = scale.dtype == torch.int16
    return {"has_significand": pairs, "scales_result": pairs, "has_tensor_scale": tensor_scale is not None}
