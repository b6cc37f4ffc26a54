"""The operators of a decoder's step on a GPU, against their definitions."""

import pytest
import torch

import pt2mx
from pt2mx import FORMATS, MXSpec, quantize_mx
from pt2mx.kernels import float_scales, reference
from pt2mx.kernels.gpu.mma_layout import to_mma_layout
from pt2mx.ops.decoding import (
    NormedLinearMX,
    ResidualLinearMX,
    decoding_attention,
    normed_linear_mx,
    residual_linear_mx,
)

pytestmark = pytest.mark.cuda

ROWS = (1, 2, 3, 5, 8, 9, 16, 32)
SHAPES = [(256, 512), (48, 200), (1008, 1384), (16, 8), (4096, 2048), (28672, 4096)]


def weight_of(name, n, k):
    scale, data = quantize_mx((torch.randn(n, k) / k**0.5).cuda(), name)
    return to_mma_layout(data, scale, MXSpec(name))


def x_of(rows, k):
    return torch.randn(rows, k, device="cuda").bfloat16()


def check(got, want):
    """Sums in another order round a few results to a neighbouring bfloat16, and a gate multiplies two of them."""
    assert got.shape == want.shape and got.dtype == want.dtype and got.isfinite().all()
    assert (got.float() - want.float()).norm() <= 2**-8 * want.float().norm()


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_norm_and_a_gate(name, shape, gate):
    n, k = shape
    weight, bias = weight_of(name, n, k), torch.randn(n, device="cuda").bfloat16()
    for rows in ROWS:
        x = 30 * x_of(rows, k)
        squares = torch.rand(rows, -(-k // 16), device="cuda") * 16 + 1
        for added, of_x in ((None, squares), (bias, squares), (bias, None)):
            rest = of_x, 1e-5, gate
            got = normed_linear_mx(x, *weight, added, name, n, *rest)
            check(got, NormedLinearMX(x, *weight, added, name, n, *rest).decompose())
            assert torch.equal(got, normed_linear_mx(x, *weight, added, name, n, *rest))


@pytest.mark.parametrize("shape", [*SHAPES, (33, 72)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_residual_sum(name, shape):
    n, k = shape
    weight, bias, norm_weight = weight_of(name, n, k), *(torch.randn(n, device="cuda").bfloat16() for _ in range(2))
    for rows in ROWS:
        x, residual = x_of(rows, k), x_of(rows, n)
        for added in (None, bias):
            got = residual_linear_mx(x, *weight, added, name, n, residual, norm_weight)
            want = ResidualLinearMX(x, *weight, added, name, n, residual, norm_weight).decompose()
            for one, other in zip(got, want, strict=True):
                check(one, other)
            assert torch.equal(got[1], got[0] * norm_weight)
            again = residual_linear_mx(x, *weight, added, name, n, residual, norm_weight)
            assert all(map(torch.equal, got, again))


def test_a_tensor_scale():
    spec, w = pt2mx.parse("nvfp4"), torch.randn(256, 512).cuda()
    t = float_scales.tensor_scale(w, spec)
    scale, data = reference.quantize(w, spec.replace(axis=1), tensor_scale=t)
    weight = to_mma_layout(data, scale, spec)
    x, residual, one = x_of(3, 512), x_of(3, 256), torch.ones(256, device="cuda").bfloat16()
    squares = torch.rand(3, 32, device="cuda") + 1
    name = spec.element.name
    got = normed_linear_mx(x, *weight, None, name, 256, squares, 1e-5, "silu", t)
    check(got, NormedLinearMX(x, *weight, None, spec.element.name, 256, squares, 1e-5, "silu", t).decompose())
    got = residual_linear_mx(x, *weight, None, name, 256, residual, one, t)
    want = ResidualLinearMX(x, *weight, None, spec.element.name, 256, residual, one, t).decompose()
    for mine, other in zip(got, want, strict=True):
        check(mine, other)


def test_more_rows_are_the_definition():
    weight, x = weight_of("fp4_e2m1", 64, 128), x_of(33, 128)
    got = normed_linear_mx(x, *weight, None, "fp4_e2m1", 64, None, 0.0, "silu")
    assert torch.equal(got, NormedLinearMX(x, *weight, None, "fp4_e2m1", 64, None, 0.0, "silu").decompose())


ATTENTION = [(1, 8, 8, 64), (2, 8, 2, 128), (3, 4, 4, 32), (8, 16, 2, 64), (1, 4, 1, 256), (5, 3, 3, 128)]


@pytest.mark.parametrize("slots", [1, 15, 64, 100, 512, 1030, 2048, 5000])
@pytest.mark.parametrize(("batch", "heads", "key_heads", "width"), ATTENTION)
def test_attention(batch, heads, key_heads, width, slots):
    torch.manual_seed(0)
    query = torch.randn(batch, heads, 1, width, device="cuda").bfloat16()
    keys, values = (torch.randn(batch, key_heads, slots, width, device="cuda").bfloat16() for _ in range(2))
    mask = torch.rand(batch, 1, 1, slots, device="cuda") < 0.7
    mask[0] = False
    zeros = torch.zeros(64, dtype=torch.int32, device="cuda")
    for seen in (None, mask):
        wide = [tensor.float() for tensor in (query, keys, values)]
        want = torch.nn.functional.scaled_dot_product_attention(*wide, seen, scale=0.3, enable_gqa=True)
        for counters in (None, zeros):
            got = decoding_attention(query, keys, values, seen, 0.3, counters)
            check(got[1:], want[1:].bfloat16()) if batch > 1 else None
            assert (
                (got[0] == 0).all() if seen is not None else (got[0].float() - want[0]).norm() <= 0.01 * want[0].norm()
            )
            for _ in range(3):
                assert torch.equal(got, decoding_attention(query, keys, values, seen, 0.3, counters))
            assert not zeros.any()


def test_attention_in_a_graph():
    query = torch.randn(2, 8, 1, 64, device="cuda").bfloat16()
    keys, values = (torch.randn(2, 2, 512, 64, device="cuda").bfloat16() for _ in range(2))
    zeros = torch.zeros(64, dtype=torch.int32, device="cuda")
    want = decoding_attention(query, keys, values, None, None, zeros)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chained = query
        for _ in range(4):
            got = decoding_attention(chained, keys, values, None, None, zeros)
            chained = query + 0 * got
    for _ in range(20):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want) and not zeros.any()


def test_a_cache_that_is_not_aligned():
    query = torch.randn(1, 4, 1, 64, device="cuda").bfloat16()
    keys, values = (torch.randn(1 + 4 * 100 * 64, device="cuda").bfloat16()[1:].view(1, 4, 100, 64) for _ in range(2))
    got = decoding_attention(query, keys, values, None, None, None)
    assert torch.equal(got, decoding_attention(query, keys.clone(), values.clone(), None, None, None))
