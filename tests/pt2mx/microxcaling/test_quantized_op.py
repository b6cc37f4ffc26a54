"""The format, dimension and rounding of each operand of each matmul, and the roundings to floats. Each value is
computed here with torch's own operators."""

import copy

import pytest
import torch
from torch.nn import functional

from pt2mx import MXError
from pt2mx.microxcaling import bmm, conv2d, finalize_mx_specs, linear, matmul, quantize_elemwise_op, quantize_mx_op
from pt2mx.microxcaling.specs import get_backwards_mx_specs

FORMATS = {
    "w_elem_format": "fp6_e3m2",
    "a_elem_format": "fp8_e4m3",
    "w_elem_format_bp": "fp4_e2m1",
    "a_elem_format_bp": "fp6_e2m3",
    "a_elem_format_bp_ex": "int8",
    "a_elem_format_bp_os": "fp8_e5m2",
}
MODES = ("nearest", "floor", "even")
ROUNDS = (
    *("weight", "output", "grad_weight", "grad_input", "mx_output", "mx_input_grad_input", "mx_weight_grad_input"),
    *("mx_grad_output_grad_input", "mx_input_grad_weight", "mx_grad_output_grad_weight"),
)
#: three settings: the roundings by their keys differ in each from what they are in the others
EVERY = pytest.mark.parametrize("turn", range(4))


def specs_of(turn: int) -> dict:
    """Give every key a different value; the last specs quantize no backward pass."""
    rounds = {f"round_{name}": MODES[(i + i // 3 * turn + turn) % 3] for i, name in enumerate(ROUNDS)}
    return finalize_mx_specs({**FORMATS, **rounds, "block_size": 8, "bfloat": 12, "quantize_backprop": turn < 3})


class Rounders:
    """`f(x, key)`: floats; `q(x, format key, axis, rounding key)`: MX blocks."""

    def __init__(self, specs):
        self.specs = specs

    def f(self, x, key):
        return quantize_elemwise_op(x, self.specs, self.specs[f"round_{key}"])

    def q(self, x, key, axis, round=None):
        mode = "nearest" if round is None else self.specs[f"round_mx_{round}"]
        return quantize_mx_op(x, self.specs, self.specs[key], axes=axis, round=mode)


def tensors(*shapes):
    torch.manual_seed(1)
    return [torch.randn(shape).mul(8).round().div(8).requires_grad_() for shape in shapes]


def check(function, leaves, expected_y, expected_grads):
    y = function(*leaves)
    torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((y * weights(y)).sum(), leaves)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def weights(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(2))


@EVERY
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_linear(turn, leading):
    specs = specs_of(turn)
    leaves = x, w, b = tensors((*leading, 12, 20), (10, 20), (10,))
    forward, back = Rounders(specs), Rounders(get_backwards_mx_specs(specs))
    with torch.no_grad():
        fx, fw = forward.f(x, "output"), forward.f(w, "weight")
        q = forward.q(fx, "a_elem_format", -1, "output"), forward.q(fw, "w_elem_format", -1, "output")
        y = forward.f(forward.f(functional.linear(*q), "output") + forward.f(b, "weight"), "output")
        if not specs["quantize_backprop"]:
            fx, fw = x, w
        g = back.f(weights(y), "grad_input")
        by_row = back.q(g, "a_elem_format_bp_ex", -2, "grad_output_grad_weight")
        inputs = back.q(fx, "a_elem_format_bp", -2, "input_grad_weight")
        grad_w = back.f(by_row.reshape(-1, 10).T @ inputs.reshape(-1, 20), "grad_weight")
        by_channel = back.q(g, "a_elem_format_bp_os", -1, "grad_output_grad_input")
        grad_x = back.f(by_channel @ back.q(fw, "w_elem_format_bp", 0, "weight_grad_input"), "grad_input")
        grad_b = back.f(g.reshape(-1, 10).sum(0), "grad_weight")
    check(lambda x, w, b: linear(x, w, b, specs), leaves, y, (grad_x, grad_w, grad_b))


@EVERY
@pytest.mark.parametrize("mode", ["aa", "aw", "wa"])
def test_matmul(turn, mode):
    specs = specs_of(turn)
    leaves = a, b, bias = tensors((2, 3, 9, 20), (2, 3, 20, 10), (10,))
    forward, back = Rounders(specs), Rounders(get_backwards_mx_specs(specs))
    with torch.no_grad():
        fa, fb = forward.f(a, "output"), forward.f(b, "output")
        qa = forward.q(fa, f"{mode[0]}_elem_format", -1, "output")
        y = qa @ forward.q(fb, f"{mode[1]}_elem_format", -2, "output")
        y = forward.f(forward.f(y, "output") + forward.f(bias, "weight"), "output")
        if not specs["quantize_backprop"]:
            fa, fb = a, b
        g = back.f(weights(y), "grad_input")
        qb = back.q(fb, f"{mode[1]}_elem_format_bp", -1, "input_grad_input")
        grad_a = back.f(back.q(g, "a_elem_format_bp_os", -1, "grad_output_grad_input") @ qb.mT, "grad_input")
        qa = back.q(fa, f"{mode[0]}_elem_format_bp", -2, "input_grad_input")
        grad_b = back.f(qa.mT @ back.q(g, "a_elem_format_bp_os", -2, "grad_output_grad_input"), "grad_input")
        grad_bias = back.f(g.sum((0, 1, 2)), "grad_weight")
    check(lambda a, b, c: matmul(a, b, c, specs, None, mode), leaves, y, (grad_a, grad_b, grad_bias))


def test_bmm_is_matmul_of_activations():
    specs = specs_of(1)
    a, b = tensors((6, 9, 20), (6, 20, 10))
    y = bmm(a, b, specs)
    assert torch.equal(y, matmul(a, b, mx_specs=specs))
    both = [torch.autograd.grad(f(a, b, mx_specs=specs).square().sum(), (a, b)) for f in (bmm, matmul)]
    assert all(torch.equal(got, want) for got, want in zip(*both, strict=True))


def test_leading_dimensions_are_broadcast():
    specs = specs_of(0) | {"bfloat": 0}  # gradients would be rounded after the sum, or before it
    a, b = tensors((2, 3, 9, 20), (20, 10))
    y = matmul(a, b, mx_specs=specs)
    whole = b.detach().expand(2, 3, 20, 10).clone().requires_grad_()
    expected = matmul(a, whole, mx_specs=specs)
    assert torch.equal(y, expected)
    got, want = (torch.autograd.grad(out.sum(), x)[0] for out, x in ((y, b), (expected, whole)))
    torch.testing.assert_close(got, want.sum((0, 1)))


@EVERY
@pytest.mark.parametrize("groups", [1, 2])
def test_conv2d(turn, groups):
    """MX blocks are rounded "nearest" with the formats of the forward pass."""
    specs = specs_of(turn)
    leaves = x, w, b = tensors((10, 12, 6, 7), (10, 12 // groups, 3, 2), (10,))
    call = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": groups}
    forward, back = Rounders(specs), Rounders(get_backwards_mx_specs(specs))
    with torch.no_grad():
        fx, fw = forward.f(x, "output"), forward.f(w, "weight")
        q = forward.q(fx, "a_elem_format", 1), forward.q(fw, "w_elem_format", 1)
        y = forward.f(functional.conv2d(*q, forward.f(b, "weight"), **call), "output")
        if not specs["quantize_backprop"]:
            fx, fw = x, w
        g = back.f(weights(y), "grad_input")
        grad_b = back.f(g.sum((0, 2, 3)), "grad_weight")
        in_x, in_w = back.q(fx, "a_elem_format", 0), back.q(fw, "w_elem_format", 0)
        of_x, of_w = back.q(g, "a_elem_format", 1), back.q(g, "a_elem_format", 0)
    grad_x, grad_w = (leaf.detach().requires_grad_() for leaf in (x, w))
    (grad_x,) = torch.autograd.grad(functional.conv2d(grad_x, in_w, **call), grad_x, of_x)
    (grad_w,) = torch.autograd.grad(functional.conv2d(in_x, grad_w, **call), grad_w, of_w)
    grads = back.f(grad_x, "grad_input"), back.f(grad_w, "grad_weight"), grad_b
    check(lambda x, w, b: conv2d(x, w, b, **call, mx_specs=specs), leaves, y, grads)


@pytest.mark.parametrize("function", [linear, bmm, matmul])
def test_specs_that_are_not_finalized(function):
    """The backward pass has no formats there: only what `finalize_mx_specs` fills in follows the forward pass."""
    a, b = tensors((2, 9, 20), (10, 20) if function is linear else (2, 20, 10))
    specs = {"w_elem_format": "fp4", "a_elem_format": "fp4", "block_size": 8}
    before = copy.copy(specs)
    grads = torch.autograd.grad(function(a, b, mx_specs=specs).sum(), (a, b))
    plain = functional.linear if function is linear else torch.bmm
    assert specs == before and not torch.equal(function(a, b, mx_specs=specs), plain(a, b))
    for got, want in zip(grads, torch.autograd.grad(plain(a, b).sum(), (a, b)), strict=True):
        torch.testing.assert_close(got, want)


def test_a_gradient_of_the_gradient_is_refused():
    a, b = tensors((9, 20), (10, 20))
    (grad,) = torch.autograd.grad(linear(a, b, mx_specs=specs_of(0)).square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_errors():
    a, b = tensors((9, 20), (20, 10))
    with pytest.raises(MXError, match="unknown mode_config 'ww': did you mean"):
        matmul(a, b, mx_specs=specs_of(0), mode_config="ww")
    with pytest.raises(MXError, match="mx_specs have no key 'blocks'"):
        matmul(a, b, mx_specs={"blocks": 2})
    with pytest.raises(MXError, match=r"cannot quantize a tensor of dtype torch\.float64"):
        matmul(a.double(), b.double(), mx_specs={"a_elem_format": "int8"})
    with pytest.raises(MXError, match=r"in2 of shape \(64,\) must have two dimensions or more: use unsqueeze"):
        matmul(torch.randn(4, 64), torch.randn(64), mx_specs={"a_elem_format": "fp8_e4m3"})
