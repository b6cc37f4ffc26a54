"""Attention on a GPU that quantizes its result: to the bit what attention and then `fake_quantize_mx` give."""

import pytest
import torch

import pt2mx
from pt2mx.modes import SCALE_MODES
from tests.attention import attend
from tests.compare import same
from tests.oracle import NARROW, modes_of

pytestmark = pytest.mark.cuda

_DTYPES = [torch.float32, torch.bfloat16]


def operands(width=32, dtype=torch.float32, heads=4, key_heads=2, queries=70, keys=50):
    query = 2 * torch.randn(2, queries, heads, width, device="cuda").transpose(1, 2)
    key, value = (torch.randn(2, key_heads, keys, width, device="cuda") for _ in range(2))
    return [tensor.bfloat16().to(dtype) for tensor in (query, key, value)]


def check(given, modes, mask=None, causal=False, out_dtype=None):
    """Compare one step and two, where the kernel takes one."""
    product = attend(*given, mask, causal)
    want = pt2mx.fake_quantize_mx(product.transpose(1, 2), *modes[:2], -1, *modes[2:]).transpose(1, 2)
    got = attend(*given, mask, causal, None, None, *modes, out_dtype=out_dtype)
    assert same(got, want.to(out_dtype or want.dtype)) and got.transpose(1, 2).is_contiguous()


@pytest.fixture(autouse=True)
def the_kernel_serves(monkeypatch):
    """A call that quantizes in two steps would agree as well."""
    from pt2mx.kernels.gpu import bf16_matmul

    kernel, quantizations = bf16_matmul.attention, []

    def attention(*args):
        got = kernel(*args)
        quantizations.extend(args[2:3] if got is not None else ())
        return got

    monkeypatch.setattr(bf16_matmul, "attention", attention)
    yield
    assert any(quantizations)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_elements(name, dtype):
    check(operands(64, dtype), (name, 32))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in ("fp8_e4m3", "fp4_e2m1", "int8")
        for mode in modes_of(name)
        if not SCALE_MODES[mode].searches
    ],
)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_scale_modes(mode, name, dtype):
    check(operands(32, dtype), (name, 32, mode, "even"))


@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_widths_masks_and_dtypes_of_the_result(width, dtype):
    given, modes = operands(width, dtype), ("fp6_e2m3", 32)
    check(given, modes, causal=True)
    check(given, modes, torch.rand(70, 50, device="cuda") < 0.7)
    check(given, modes, torch.randn(2, 1, 1, 50, device="cuda").to(dtype))
    for out_dtype in (torch.float32, torch.float16, torch.bfloat16):
        check(given, modes, out_dtype=out_dtype)


@pytest.mark.parametrize("factor", [2.0**-130, 2.0**-120, 2.0**120])
@pytest.mark.parametrize("name", ["fp8_e5m2", "fp4_e2m1", "int8"])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_values_at_the_ends_of_the_range_and_beyond(factor, name, dtype):
    query, key, value = operands(32, dtype)
    value = value * factor
    value[0, 0, 3, 5], value[1, 1, 4, 7] = float("inf"), float("nan")
    check((query, key, value), (name, 32))


def test_a_query_that_sees_nothing():
    mask = torch.ones(70, 50, dtype=torch.bool, device="cuda")
    mask[3] = False
    check(operands(), ("fp8_e4m3", 32), mask)


def test_a_captured_graph():
    given, modes = operands(), (None, False, None, None, "fp8_e4m3", 32)
    want = attend(*given, *modes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(*given, *modes)
    for _ in range(3):
        graph.replay()
        assert same(got, want)
