"""`linear_fake_quantize_mx`: what it is made of, its gradients, and what it refuses."""

import pytest
import torch
from torch.library import opcheck

import pt2mx
from pt2mx import MXError, MXSpec
from pt2mx.ops.activations import activation_fake_quantize_mx
from pt2mx.ops.linear import linear_mx
from pt2mx.ops.quantize_epilogue import linear_fake_quantize_mx


def packed(n, k, name="int8", block=32):
    scale, data = pt2mx.quantize_mx(torch.randn(n, k), MXSpec(name, block))
    return data, scale


def in_two_steps(x, data, scale, bias, elem, block, product_dtype, activation, *modes):
    return activation_fake_quantize_mx(
        linear_mx(x, data, scale, bias, elem, block, 0, product_dtype), activation, *modes
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96,), (3, 96), (40, 96), (2, 0, 96), (2, 20, 96)])
def test_two_steps(shape, dtype):
    torch.manual_seed(0)
    for elem, out_elem, block in (("int8", "fp4_e2m1", 32), ("fp8_e4m3", "int8", 20), ("fp6_e3m2", "fp6_e3m2", 32)):
        data, scale = packed(64, 96, elem, block)
        for product_dtype, target_dtype in ((None, None), (torch.float32, torch.bfloat16)):
            bias = torch.randn(64).to(product_dtype or dtype)
            for modes in (("floor", "even"), ("mse", "half_away")):
                x = pt2mx.fake_quantize_mx(torch.randn(shape), MXSpec(elem, 32)).to(dtype)
                args = x, data, scale, bias, elem, block, product_dtype, "gelu", out_elem, block, *modes, target_dtype
                got, want = linear_fake_quantize_mx(*args), in_two_steps(*args)
                assert got.dtype == want.dtype and torch.equal(got, want)


def test_opcheck():
    data, scale = packed(64, 96)
    x = torch.randn(40, 96, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(64, requires_grad=True)
    args = "int8", 32, torch.float32, "silu", "int8", 32, "floor", "even", torch.bfloat16
    opcheck(linear_fake_quantize_mx, (x, data, scale, bias, *args))
    opcheck(linear_fake_quantize_mx, (x, data, scale, None, "int8", 32, None, "none", "fp4_e2m1", 16, "floor", "even"))


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "silu", "relu"])
def test_gradients_are_those_of_two_steps(activation):
    torch.manual_seed(0)
    data, scale = packed(64, 96)
    args = "int8", 32, torch.float32, activation, "int8", 32, "floor", "even", torch.bfloat16
    results = []
    for function in (linear_fake_quantize_mx, in_two_steps):
        torch.manual_seed(1)
        x = torch.randn(2, 20, 96, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.randn(64, requires_grad=True)
        y = function(x, data, scale, bias, *args)
        y.backward(torch.randn_like(y))
        results.append((y, x.grad, bias.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target_dtype", [None, torch.float32, torch.float16])
def test_autocast_is_that_of_two_steps(target_dtype):
    data, scale = packed(64, 96)
    x, bias = torch.randn(40, 96), torch.randn(64)
    args = x, data, scale, bias, "int8", 32, torch.float32, "gelu", "int8", 32, "floor", "even", target_dtype
    with torch.autocast("cpu", torch.bfloat16):
        got, want = linear_fake_quantize_mx(*args), in_two_steps(*args)
    assert got.dtype == want.dtype == (target_dtype or torch.bfloat16) and torch.equal(got, want)


@pytest.mark.parametrize("out_elem", ["int10", "int16", "fp16_e5m10", "fp10_e5m4"])
def test_wide_elements(out_elem):
    torch.manual_seed(0)
    data, scale = packed(64, 64)
    x = pt2mx.fake_quantize_mx(torch.randn(40, 64), MXSpec("int8", 32)).bfloat16()
    for activation in ("none", "gelu"):
        for dtype in (torch.float32, torch.bfloat16):
            args = x, data, scale, None, "int8", 32, torch.float32, activation, out_elem, 32, "floor", "even", dtype
            assert torch.equal(linear_fake_quantize_mx(*args), in_two_steps(*args))


@pytest.mark.compiled
def test_dynamic_rows_compile():
    torch.manual_seed(0)
    data, scale = packed(64, 96)

    @torch.compile(dynamic=True)
    def function(x):
        y = linear_fake_quantize_mx(
            x, data, scale, None, "int8", 32, torch.float32, "gelu", "int8", 32, "floor", "even"
        )
        return y * 2

    for rows in (40, 7, 100):
        x = pt2mx.fake_quantize_mx(torch.randn(rows, 96), MXSpec("int8", 32)).bfloat16()
        args = "int8", 32, torch.float32, "gelu", "int8", 32, "floor", "even"
        want = 2 * in_two_steps(x, data, scale, None, *args)
        assert torch.equal(function(x), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(40, 64)}, r"x of shape \(40, 64\) times a weight"),
        ({0: torch.ones(40, 96, dtype=torch.float64)}, "float64"),
        ({3: torch.ones(63)}, "bias of shape"),
        ({3: torch.ones(64, dtype=torch.bfloat16)}, "torch.bfloat16 on (cpu|meta) does not fit"),
        ({4: "fp5"}, "fp5"),
        ({5: 0}, "block_size"),
        ({6: torch.int8}, "torch.int8 must be float32"),
        ({7: "tanh"}, "activation='tanh' must be one of none, gelu"),
        ({8: "fp5"}, "the result of the product: .*fp5"),
        ({9: -1}, "the result of the product: .*block_size"),
        ({10: "floors"}, "floors"),
        ({11: "stochastic"}, "values are not rounded 'stochastic'"),
        ({12: torch.float64}, "torch.float64 must be float32"),
    ],
)
def test_bad_arguments(change, message):
    args = [torch.ones(40, 96), *packed(64, 96), torch.ones(64), "int8", 32, torch.float32]
    args += ["gelu", "int8", 32, "floor", "even", torch.bfloat16]
    for place, value in change.items():
        args[place] = value
    with pytest.raises(MXError, match=message):
        linear_fake_quantize_mx(*args)
    with pytest.raises(MXError, match=message):
        linear_fake_quantize_mx(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
