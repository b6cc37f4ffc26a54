"""What linear_nibbles.h owes its callers: it reads no memory past a tensor, and threads do not change its bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pt2mx import MXSpec, ops
from tests.cpu_kernels import DTYPES, linear
from tests.threads import on_threads


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e3m2", "int8"])
def test_reads_nothing_past_a_tensor(name: str, rows: int, before_guard_page: Callable[[Tensor], Tensor]) -> None:
    """Rows of the weight that end at a vector of codes, or one to three bytes after it."""
    for n, k in ((1, 1), (1, 32), (1, 128), (1, 129), (5, 131), (3, 133), (17, 257)):
        scale, data = ops.quantize_mx(torch.randn(n, k), name, 32, -1, "floor", "even")
        for dtype in DTYPES:
            x, bias, spec = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype), MXSpec(name, 32, 1)
            expected = linear(x, data, scale, bias, spec)
            x, *weight, bias = map(before_guard_page, (x, data, scale, bias))
            assert torch.equal(linear(x, weight[0], weight[1], bias, spec), expected), (n, k, dtype)


@pytest.mark.parametrize("byte", [0, 5, 255])
@pytest.mark.parametrize("rows", [1, 9])
def test_extreme_scales_and_threads(byte: int, rows: int) -> None:
    """Rows of the weight with an extreme scale are multiplied otherwise; their neighbors are not, whichever thread
    multiplies them."""
    x = torch.randn(rows, 2048)
    scale, data = ops.quantize_mx(torch.randn(517, 2048), "fp4_e2m1", 32, -1, "floor", "even")
    spec = MXSpec("fp4_e2m1", 32, 1)
    usual = linear(x, data, scale, None, spec)
    scale[13::90, 1] = byte
    in_tile = torch.zeros(517, dtype=torch.bool)  # of four rows, which have one kernel
    for row in range(13, 517, 90):
        in_tile[row // 4 * 4 : row // 4 * 4 + 4] = True
    results = on_threads(lambda: linear(x, data, scale, None, spec), 1, 2, 3, 5)
    for y in results:
        assert torch.equal(y.nan_to_num(), results[0].nan_to_num())
        assert torch.equal(y[:, ~in_tile], usual[:, ~in_tile])
        assert y[:, 13::90].isnan().all() == (byte == 255)
