"""`conv2d_fake_quantize_mx`: what it is made of, its gradients, and what it refuses."""

import pytest
import torch
from torch.library import opcheck

import pt2mx
from pt2mx import MXError, MXSpec
from pt2mx.ops.quantize_epilogue import Conv2dFakeQuantize, conv2d_fake_quantize_mx


def in_two_steps(*args):
    """The definition, by the operators that it fuses."""
    return Conv2dFakeQuantize.from_args(*args).in_steps(*[lambda call: call.call()] * 2)


def arguments(
    name="int8",
    dtype=torch.bfloat16,
    product=torch.float32,
    residual=None,
    activation="relu",
    keep=True,
    n=64,
    modes=("floor", "even"),
):
    """Of images (2, 6, 7, 40) and a result of (2, 3, 7, n)."""
    torch.manual_seed(0)
    scale, data = pt2mx.quantize_mx(torch.randn(n, 3, 3, 40), MXSpec(name, 32))
    x = pt2mx.fake_quantize_mx(torch.randn(2, 6, 7, 40), MXSpec(name, 32)).to(dtype)
    added = None if residual is None else torch.randn(2, 3, 7, n).to(residual)
    moves = ((2, 1), (1, 1), (1, 1))
    epilogue = activation, keep, name, 32, *modes
    return [x, data, scale, torch.randn(n).to(product), name, 32, *moves, product, added, *epilogue]


@pytest.mark.diagonal
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp4_e2m1", "fp6_e3m2"])
def test_two_steps(name, residual, keep):
    for dtype in (torch.bfloat16, torch.float32):
        for product in (torch.float32, torch.bfloat16):
            for activation, *modes in (
                ("silu", "ceil", "half_away"),
                ("none", "mse", "even"),
                *((activation, "floor", "even") for activation in ("relu", "none", "gelu", "gelu_tanh", "silu")),
            ):
                args = arguments(name, dtype, product, residual, activation, keep, modes=modes)
                (activated, got), (close, want) = conv2d_fake_quantize_mx(*args), in_two_steps(*args)
                assert (got.dtype, got.shape) == (want.dtype, want.shape) and torch.equal(got, want)
                assert (activated.dtype, activated.shape) == (close.dtype, close.shape)
                rounding = {} if activation in ("gelu", "gelu_tanh", "silu") else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(activated, close, **rounding)
                assert activated.numel() == (2 * 3 * 7 * 64 if keep else 0)


def test_values_of_the_definition():
    args = arguments("fp8_e4m3", residual=torch.float32)
    x, data, scale, bias, *_, residual, _, _, _, _, _, _ = args
    weight = pt2mx.dequantize_mx(data, scale, MXSpec("fp8_e4m3", 32)).permute(0, 3, 1, 2)
    images = x.double().permute(0, 3, 1, 2)
    product = torch.nn.functional.conv2d(images, weight.double(), bias.double(), (2, 1), 1)
    want = torch.relu(product.permute(0, 2, 3, 1) + residual)
    activated, quantized = conv2d_fake_quantize_mx(*args)
    torch.testing.assert_close(activated.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(quantized, pt2mx.fake_quantize_mx(activated, MXSpec("fp8_e4m3", 32)))


@pytest.mark.compiled
def test_opcheck():
    args = arguments(residual=torch.float32)
    for place in (0, 3, 10):
        args[place].requires_grad_()
    opcheck(conv2d_fake_quantize_mx, (*args, torch.bfloat16))
    opcheck(conv2d_fake_quantize_mx, (*arguments(keep=False, activation="none", n=20),))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "silu", "relu"])
def test_gradients_are_those_of_two_steps(activation, keep):
    results = []
    for function in (conv2d_fake_quantize_mx, in_two_steps):
        args = arguments("fp8_e4m3", residual=torch.float32, activation=activation, keep=keep)
        leaves = [args[place].requires_grad_() for place in (0, 3, 10)]
        activated, quantized = function(*args, torch.bfloat16)
        (quantized.float().square().sum() + activated.float().sum()).backward()
        results.append([leaf.grad for leaf in leaves])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_autocast_around_backward_changes_no_gradient():
    results = []
    for autocast in (False, True):
        args = arguments("fp8_e4m3", residual=torch.float32)
        leaves = [args[place].requires_grad_() for place in (0, 3, 10)]
        _, quantized = conv2d_fake_quantize_mx(*args)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(torch.autograd.grad(quantized.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_derivative_is_an_error():
    args = arguments()
    args[0].requires_grad_()
    _, quantized = conv2d_fake_quantize_mx(*args)
    (grad,) = torch.autograd.grad(quantized.square().sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.float().sum().backward()


@pytest.mark.parametrize("target_dtype", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16])
def test_autocast_is_that_of_two_steps(residual, target_dtype):
    args = [*arguments(residual=residual), target_dtype]
    with torch.autocast("cpu", torch.bfloat16):
        got, want = conv2d_fake_quantize_mx(*args), in_two_steps(*args)
    for actual, expected in zip(got, want, strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_any_strides_and_no_images():
    args = arguments(residual=torch.float32)
    args[0] = args[0].permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    args[10] = args[10].permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    for got, want in zip(conv2d_fake_quantize_mx(*args), in_two_steps(*args), strict=True):
        assert torch.equal(got, want)
    args[0], args[10] = args[0][:0], args[10][:0]
    assert [y.shape for y in conv2d_fake_quantize_mx(*args)] == [(0, 3, 7, 64)] * 2


@pytest.mark.compiled
def test_compiled_with_any_size():
    args = arguments("fp8_e4m3")

    @torch.compile(dynamic=True)
    def function(x):
        activated, quantized = conv2d_fake_quantize_mx(x, *args[1:])
        return activated * 2, quantized + 1

    for shape in ((2, 6, 7, 40), (3, 8, 9, 40)):
        x = pt2mx.fake_quantize_mx(torch.randn(shape), MXSpec("fp8_e4m3", 32)).bfloat16()
        activated, quantized = in_two_steps(x, *args[1:])
        for got, want in zip(function(x), (activated * 2, quantized + 1), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(2, 6, 7, 64)}, r"x of shape \(2, 6, 7, 64\) under a weight"),
        ({0: torch.ones(2, 6, 7)}, "put the channels last"),
        ({3: torch.ones(63)}, "bias of shape"),
        ({4: "fp5"}, "fp5"),
        ({6: (0, 1)}, "stride"),
        ({9: torch.int8}, "torch.int8 must be float32"),
        ({10: torch.ones(2, 3, 7, 32)}, r"the residual of shape \(2, 3, 7, 32\), .* must be \(2, 3, 7, 64\)"),
        ({10: torch.ones(2, 3, 7, 64, dtype=torch.float64)}, "torch.float64 on (cpu|meta) must be"),
        ({11: "tanh"}, "activation='tanh' must be one of none, gelu"),
        ({13: "fp5"}, "the result of the convolution: .*fp5"),
        ({14: -1}, "the result of the convolution: .*block_size"),
        ({15: "floors"}, "floors"),
        ({16: "stochastic"}, "values are not rounded 'stochastic'"),
        ({17: torch.float64}, "torch.float64 must be float32"),
    ],
)
def test_bad_arguments(change, message):
    args = [*arguments(residual=torch.float32), torch.bfloat16]
    for place, value in change.items():
        args[place] = value
    with pytest.raises(MXError, match=message):
        conv2d_fake_quantize_mx(*args)
    with pytest.raises(MXError, match=message):
        conv2d_fake_quantize_mx(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
