"""Products of experts on a GPU, of values that bfloat16 holds, with a result in float32."""

import pytest
import torch

from pt2mx import ops
from pt2mx.ops.linear import grouped_linear_mx
from tests.compare import relative_error, same
from tests.oracle import NARROW

pytestmark = pytest.mark.cuda


def operands(rows, experts, n, k, name="fp8_e4m3"):
    """x in bfloat16, codes, scales, and the values of the weight."""
    scale, data = ops.quantize_mx(torch.randn(experts, n, k, device="cuda"), name, 32, -1, "floor", "even")
    x = ops.fake_quantize_mx(
        torch.randn(rows, k, device="cuda"), name, 32, -1, "floor", "even", None, "identity"
    ).bfloat16()
    return x, data, scale, ops.dequantize_mx(data, scale, name, 32, torch.float32, -1, k)


def check(ends, n, k, name="fp8_e4m3", rows=None):
    x, data, scale, weight = operands(rows or ends[-1], len(ends), n, k, name)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    got = grouped_linear_mx(x, data, scale, offs, name, 32, torch.float32)
    assert got.shape == (len(x), n) and got.dtype == torch.float32
    pairs = [(x[a:b], w) for a, b, w in zip([0, *ends], ends, weight, strict=False)]
    exact = torch.cat([rows.double() @ w.double().T for rows, w in pairs])
    product = torch.cat([rows.float() @ w.T for rows, w in pairs])
    if exact.numel():
        bound = max(1.3 * relative_error(product, exact), 1e-7)
        assert relative_error(got[: ends[-1]], exact) <= bound
    strided = grouped_linear_mx(x.t().contiguous().t(), data, scale, offs, name, 32, torch.float32)
    assert same(strided[: ends[-1]], got[: ends[-1]])


@pytest.mark.parametrize("name", NARROW)
def test_elements(name):
    check([10, 10, 60, 200], 96, 128, name)


@pytest.mark.parametrize(
    ("ends", "n", "k"),
    [
        ([33], 40, 64),
        ([0, 1, 8, 8, 57], 37, 70),
        ([0, 0, 0], 64, 64),
        ([1, 2, 3, 4, 5, 6, 7], 1536, 1024),
        ([700, 700, 2000, 2048], 1536, 4096),
        ([*range(3, 3 * 130, 3)], 200, 96),
    ],
)
def test_ragged_groups(ends, n, k):
    torch.manual_seed(0)
    check(ends, n, k)


def test_rows_past_the_last_offset():
    check([5, 30], 64, 64, rows=300)


def test_no_rows():
    check([0, 0], 64, 64)


def test_a_captured_graph_reads_the_offsets_anew():
    x, data, scale, _ = operands(100, 4, 96, 128)
    offs = torch.tensor([20, 50, 50, 100], dtype=torch.int32, device="cuda")
    run = lambda: grouped_linear_mx(x, data, scale, offs, "fp8_e4m3", 32, torch.float32)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for ends in ([20, 50, 50, 100], [0, 0, 90, 100], [100] * 4):
        offs.copy_(torch.tensor(ends))
        graph.replay()
        assert same(got, run())


def test_gradient():
    x, data, scale, weight = operands(100, 2, 96, 128)
    offs, grad = torch.tensor([30, 100], dtype=torch.int32, device="cuda"), torch.randn(100, 96, device="cuda")
    x.requires_grad_()
    grouped_linear_mx(x, data, scale, offs, "fp8_e4m3", 32, torch.float32).backward(grad)
    want = torch.cat([grad[:30] @ weight[0], grad[30:] @ weight[1]])
    torch.testing.assert_close(x.grad, want.bfloat16(), rtol=0.01, atol=0.01)
