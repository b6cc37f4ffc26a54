"""Which kernel multiplies, for an H200's 132 multiprocessors: what was measured there stays chosen."""

import pytest

from pt2mx import ELEMENTS
from pt2mx.kernels.gpu.tuning import (
    GemmTile,
    GemvConfig,
    gemm_tile,
    gemv_config,
    kernel_of,
    max_registers,
    rotates_in_gemv,
)

FP4, FP6, FP8 = ELEMENTS["fp4_e2m1"], ELEMENTS["fp6_e3m2"], ELEMENTS["fp8_e4m3"]


@pytest.mark.parametrize(
    ("element", "n", "k", "kernels"),
    [  # the kernel of 1, 8, 9, 16, 17, 512, 513, 1536, 1537 rows of x
        (FP4, 4096, 2048, "gemv gemv gemv gemv gemm gemm gemm gemm dequantize"),
        (FP4, 8192, 8192, "gemv gemv gemv gemv gemm gemm gemm gemm dequantize"),
        (FP4, 4096, 4096, "gemv gemv gemm gemm gemm gemm gemm gemm dequantize"),
        (FP6, 4096, 2048, "gemv gemv gemm gemm gemm gemm gemm gemm dequantize"),
        (FP8, 4096, 2048, "gemv gemv gemv gemv gemm gemm gemm dequantize dequantize"),
    ],
)
def test_kernels(element, n, k, kernels):
    batches = (1, 8, 9, 16, 17, 512, 513, 1536, 1537)
    got = [kernel_of(batch, k, n // 16, element, 132, is_sm_90=True) for batch in batches]
    assert got == kernels.split()
    assert kernel_of(0, k, n // 16, element, 132, is_sm_90=True) == "dequantize"
    others = [kernel_of(batch, k, n // 16, element, 132, is_sm_90=False) for batch in (1, 32, 33)]
    assert others == ["gemv", "gemv", "dequantize"]


@pytest.mark.parametrize(
    ("element", "batch", "n", "k", "config"),
    [
        (FP4, 1, 4096, 4096, GemvConfig(1, 2, 4, 1, 4)),
        (FP4, 1, 128256, 4096, GemvConfig(2, 1, 2, 1, 2)),
        (FP4, 1, 96, 256, GemvConfig(1, 1, 4, 1, 4)),
        (FP4, 16, 8192, 8192, GemvConfig(2, 1, 4, 2, 4)),
        (FP4, 1, 4096, 14336, GemvConfig(1, 2, 8, 1, 2)),
        (FP6, 1, 2048, 2048, GemvConfig(1, 2, 4, 1, 2)),
        (FP8, 1, 2048, 2048, GemvConfig(1, 4, 4, 1, 2)),
        (FP8, 9, 4096, 1384, GemvConfig(2, 2, 4, 2, 1)),
        (FP8, 1, 28672, 4096, GemvConfig(2, 1, 2, 1, 1)),
        (FP8, 32, 512, 28672, GemvConfig(2, 1, 16, 4, 1)),
    ],
)
def test_gemv_config(element, batch, n, k, config):
    assert gemv_config(batch, k, n // 16, element, 132) == config
    assert max_registers(config, element) == (128 if (element, n) == (FP8, 28672) else None)


@pytest.mark.parametrize(
    ("element", "batch", "n", "k", "tile"),
    [
        (FP4, 17, 4096, 4096, GemmTile(32, 4, 2)),
        (FP4, 17, 4096, 14336, GemmTile(32, 4, 4)),
        (FP4, 17, 28672, 4096, GemmTile(32, 4, 1)),
        (FP4, 64, 8192, 8192, GemmTile(64, 4, 2)),
        (FP4, 64, 2048, 2048, GemmTile(64, 4, 4)),
        (FP8, 64, 8192, 8192, GemmTile(64, 4, 1)),
        (FP4, 128, 6144, 4096, GemmTile(128, 4, 1)),
        (FP4, 128, 10240, 8192, GemmTile(128, 8, 1)),
        (FP4, 130, 2048, 2048, GemmTile(128, 4, 2)),
        (FP4, 1024, 8192, 8192, GemmTile(256, 4, 1)),
        (FP8, 512, 8192, 8192, GemmTile(256, 8, 1)),
        (FP8, 512, 28672, 8192, GemmTile(256, 8, 1)),
        (FP4, 512, 28672, 8192, GemmTile(256, 4, 1)),
    ],
)
def test_gemm_tile(element, batch, n, k, tile):
    assert gemm_tile(batch, k, n // 16, element, 132) == tile


@pytest.mark.parametrize(
    ("n", "k", "alone"),
    [(2048, 2048, True), (3072, 2048, True), (2048, 8192, True), (16384, 2048, False), (128256, 2048, False)],
)
def test_small_matmuls_rotate_by_themselves(n, k, alone):
    assert rotates_in_gemv(1, k, n // 16, 32) == alone
    assert not rotates_in_gemv(2, k, n // 16, 32) and not rotates_in_gemv(1, k, n // 16, 16)
    assert not rotates_in_gemv(1, k, n // 16, 0)
