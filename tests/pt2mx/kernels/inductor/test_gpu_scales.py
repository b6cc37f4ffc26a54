"""Compiled kernels of a GPU read and write the exact bytes of scales: ptxas lost sums of some of them."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import ops
from tests.compare import same

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def compiled_afresh():
    """Forget compiled code: Dynamo compiles one function in 8 ways at most."""
    torch._dynamo.reset()


@pytest.mark.parametrize("width", [384, 1024, 4096])
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "fp8_e4m3", "int8"])
def test_an_embedding_and_a_norm(name, width):
    scale, data = ops.quantize_mx(torch.randn(1000, width, device="cuda").bfloat16(), name, 32, -1, "floor", "even")
    tokens = torch.randint(1000, (8, 64), device="cuda")

    def embedded(tokens):
        rows = F.embedding(tokens, data), F.embedding(tokens, scale)
        return ops.dequantize_mx(*rows, name, 32, torch.bfloat16, -1, width)

    def normed(tokens):
        return F.layer_norm(embedded(tokens).float() + 1, (width,))

    torch.testing.assert_close(torch.compile(normed)(tokens), normed(tokens), rtol=1e-4, atol=1e-4)
    assert same(torch.compile(embedded)(tokens), embedded(tokens))


@pytest.mark.parametrize("width", [384, 1024, 4096])
@pytest.mark.parametrize("mode", ["floor", "even", "mse"])
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp8_e4m3"])
def test_scales_of_a_norm(name, mode, width):
    x = torch.randn(512, width, device="cuda")

    def quantized(x):
        scale, data = ops.quantize_mx(torch.relu(x) * 2, name, 32, -1, mode, "even")
        return scale, data, ops.dequantize_mx(data, scale, name, 32, torch.float32, -1, width)

    assert all(same(got, want) for got, want in zip(torch.compile(quantized)(x), quantized(x), strict=True))


def test_every_scale():
    data = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8, device="cuda").repeat_interleave(8).view(256, 8)

    def values(data, scale):
        return ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32, -1)

    assert same(torch.compile(values)(data, scale), values(data, scale))
