"""Compiled code calls prepared kernels where it may, and the operators elsewhere; with the bits of eager code."""

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from pt2mx import ops
from pt2mx.ops.activations import activation_fake_quantize_mx
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.decoding import decoding_attention
from pt2mx.ops.linear import linear_mx

OPERATOR, PREPARED = "torch.ops.pt2mx.linear_mx", " = PreparedLinear("


def compiled(function, *args: Tensor, **options: object) -> str:
    """Return the generated code, after a comparison of its result with eager code."""
    torch._dynamo.reset()
    with torch.no_grad():
        result, (code,) = run_and_get_code(torch.compile(function, **options), *args)
        expected = function(*args)
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    return code


def weight_of(n: int, k: int, element: str = "fp4_e2m1") -> list[Tensor]:
    scale, data = ops.quantize_mx(torch.randn(n, k), element, 32, -1, "floor", "even")
    return [data, scale]


def test_layers_of_one_shape_share_a_prepared_call():
    weights = [weight_of(64, 64) for _ in range(3)]

    def layers(x: Tensor) -> tuple[Tensor, ...]:
        for weight in weights:
            x = linear_mx(x, *weight, None, "fp4_e2m1", 32, 0).relu()
        last = weight_of_last[0][:32], weight_of_last[1][:32]
        return x, linear_mx(x[:, None], *last, torch.ones(32), "int8", 32, 0, torch.float32)

    weight_of_last = weight_of(64, 64, "int8")
    code = compiled(layers, torch.randn(2, 64).bfloat16(), dynamic=False)
    assert OPERATOR not in code and code.count(PREPARED) == 2
    name = re.findall(r"(\w+) = PreparedLinear\(\(2, 64\)", code)[0]
    assert code.count(f"{name}(") == 3


@pytest.mark.compiled
def test_views_are_made_contiguous():
    weight = weight_of(32, 64)
    views = (lambda x: x.mT), (lambda x: x[0].mT[:1].expand(2, 64)), (lambda x: x.reshape(-1)[3:131].view(2, 64))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear_mx(view(x), *weight, None, "fp4_e2m1", 32, 0) for view in views)

    code = compiled(function, torch.randn(2, 64, 3), dynamic=False)
    assert OPERATOR not in code


def test_calls_that_stay_operators():
    weight, many = weight_of(32, 64), torch.randn(40, 64)
    scale, data = ops.quantize_mx(torch.randn(32, 64), "fp4_e2m1", 16, -1, "nearest", "even", scale_format="e4m3")

    def nvfp4(x: Tensor) -> tuple[Tensor, ...]:
        return (linear_mx(x, data, scale, None, "fp4_e2m1", 16, 0, None, "e4m3"),)

    def mxfp4(x: Tensor) -> tuple[Tensor, ...]:
        return (linear_mx(x, *weight, None, "fp4_e2m1", 32, 0),)

    cases = [(nvfp4, many[:1], False), (mxfp4, many, False), (mxfp4, many[:0], False), (mxfp4, many[:3], True)]
    for function, x, dynamic in cases:
        code = compiled(function, x, dynamic=dynamic)
        assert PREPARED not in code and OPERATOR in code


@pytest.mark.compiled
def test_a_step_of_attention_over_codes():
    """Quantized activations, attention and its matmul; the mask is a view with strides of its own."""
    cache = [t for _ in range(2) for t in reversed(quantized(torch.randn(1, 2, 16, 32)))]
    weight = weight_of(48, 128)

    def step(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        x = activation_fake_quantize_mx(x.tanh(), "none", "int8", 32, "floor", "even")
        hidden = mask[:, ::2][None, None].expand(1, 4, 1, 16)
        y = attention_mx(x.view(1, 1, 4, 32).mT.mT.transpose(1, 2), *cache, "int8", 32, 32, hidden, 0.5)
        return x, y, linear_mx(y.transpose(1, 2).reshape(1, 128), *weight, None, "fp4_e2m1", 32, 0)

    code = compiled(step, torch.randn(1, 128), torch.arange(32)[None] % 5 != 1, dynamic=False)
    assert "torch.ops.pt2mx" not in code
    assert all(f" = Prepared{kind}(" in code for kind in ("Activation", "Attention", "Linear"))


@pytest.mark.compiled
def test_any_number_of_slots():
    """Caches of several lengths share a program, whose calls stay prepared."""
    query = torch.randn(2, 4, 1, 64)

    def step(query: Tensor, keys: Tensor, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        mask = (torch.arange(keys.shape[2]) % 5 != 1)[None, None, None]
        y = decoding_attention(query, keys, keys, mask, None, None)
        return y, attention_mx(query, data, scale, data, scale, "int8", 32, 64, mask)

    for slots in (64, 96):
        keys = torch.randn(2, 2, slots, 64)
        scale, data = quantized(keys)
        for tensor in (keys, data, scale):
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        code = compiled(step, query, keys, data, scale)
        assert "torch.ops.pt2mx" not in code and code.count("Attention(") == 2


def quantized(x: Tensor) -> tuple[Tensor, ...]:
    return ops.quantize_mx(x, "int8", 32, -1, "floor", "even")
