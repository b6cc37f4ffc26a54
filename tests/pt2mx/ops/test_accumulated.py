"""Accumulated matmuls, linear layers, convolutions and attention, against torch's."""

import re

import pytest
import torch
from torch.nn import functional

import pt2mx

ops = torch.ops.pt2mx
#: sums that differ from torch's only in their order
CLOSE = "float32{32}"


def linear_close(*shape):
    x, weight, bias = torch.randn(*shape), torch.randn(7, shape[-1]), torch.randn(7)
    for each in (bias, None):
        torch.testing.assert_close(
            ops.linear_accumulated(x, weight, each, CLOSE), functional.linear(x, weight, each), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64), (0, 64)])
def test_linear(shape):
    linear_close(*shape)


@pytest.mark.parametrize(
    ("dimensions", "args"),
    [(1, ([2], [1], [2], 2)), (2, ([1, 2], [1, 0], [2, 1], 8)), (3, ([1] * 3, [1] * 3, [1] * 3, 1))],
)
def test_convolution(dimensions, args):
    groups = args[-1]
    x, weight, bias = (
        torch.randn(2, 8, *[9] * dimensions),
        torch.randn(16, 8 // groups, *[3] * dimensions),
        torch.randn(16),
    )
    torchs = getattr(functional, f"conv{dimensions}d")
    for image in (x, x[0]):
        actual = ops.convolution_accumulated(image, weight, bias, *args, CLOSE)
        torch.testing.assert_close(actual, torchs(image, weight, bias, *args), rtol=1e-4, atol=1e-4)


def test_a_convolution_adds_channel_by_channel():
    """256 in the first channel of the second tap hides the ones behind it, and not those of the first tap."""
    x = torch.ones(1, 3, 2)
    x[0, 0, 1] = 256.0
    y = ops.convolution_accumulated(x, torch.ones(1, 3, 2), None, [1], [0], [1], 1, "bfloat16{1}")
    assert y.item() == 260.0  # 3 + 256 = 259 becomes 260, and 260 + 1 + 1 stays 260


@pytest.mark.parametrize("options", ["plain", "causal", "boolean mask", "added mask", "scale"])
def test_attention(options):
    query, key, value = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 8)
    hidden = torch.rand(2, 1, 6, 9) > 0.5
    hidden[..., 0] = True
    mask = {"boolean mask": hidden, "added mask": torch.randn(6, 9)}.get(options)
    causal, scale = options == "causal", 0.3 if options == "scale" else None
    actual = ops.attention_accumulated(query, key, value, mask, causal, scale, True, CLOSE)
    expected = functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_query_without_keys_gives_zeros():
    x = torch.randn(1, 3, 4)
    assert not ops.attention_accumulated(
        x, x, x, torch.zeros(3, 3, dtype=torch.bool), False, None, False, "hopper"
    ).any()


def test_the_gradient_is_that_of_torchs_matmul():
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((2, 5, 64), (7, 64), (7,)))
    grad = torch.randn(2, 5, 7)
    actual = torch.autograd.grad(ops.linear_accumulated(x, weight, bias, "fixed(4,2)"), [x, weight, bias], grad)
    expected = torch.autograd.grad(functional.linear(x, weight, bias), [x, weight, bias], grad)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shapes", [((2, 5, 16), (16, 7), (7,)), ((5, 16), (3, 16, 7), (3, 1, 1)), ((1, 5, 16), (3, 16, 7), ())]
)
def test_gradients_of_each_tensor_alone(shapes):
    x, other, bias = tensors = [torch.randn(shape) for shape in shapes]
    for tensor in tensors:
        tensor.requires_grad_()
        y, expected = ops.matmul_accumulated(x, other, bias, "fixed(4,2)"), x @ other + bias
        grad = torch.randn(y.shape)
        torch.testing.assert_close(*(torch.autograd.grad(out, tensor, grad) for out in (y, expected)))
        tensor.requires_grad_(False)


def test_a_bias_may_be_written_before_the_backward_pass():
    x, other, bias = torch.randn(5, 16), torch.randn(16, 7, requires_grad=True), torch.randn(7)
    y = ops.matmul_accumulated(x, other, bias, "fixed(4,2)")
    bias.zero_()
    y.sum().backward()
    torch.testing.assert_close(other.grad, x.sum(0)[:, None].expand(16, 7))


def test_opcheck():
    x, other, bias = (torch.randn(shape, requires_grad=True) for shape in ((3, 2, 4), (4, 5), (5,)))
    torch.library.opcheck(ops.matmul_accumulated.default, (x, other, bias, "bfloat16"))


@pytest.mark.compiled
def test_compiled_code_gives_the_same_bits():
    x, weight, bias = torch.randn(3, 70), torch.randn(8, 70), torch.randn(8)
    compiled = torch.compile(lambda *args: ops.linear_accumulated(*args, "hopper").relu(), fullgraph=True)
    assert torch.equal(compiled(x, weight, bias), ops.linear_accumulated(x, weight, bias, "hopper").relu())


@pytest.mark.parametrize(
    ("x", "other", "accumulator", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 2), "hopper", "input (2, 3) and other (4, 2) must be (*batch, M, K)"),
        (torch.ones(3), torch.ones(3, 2), "hopper", "input (3,) and other (3, 2) must be"),
        (torch.ones(2, 3), torch.ones(3, 2), "float32", "accumulator 'float32' is torch's own matmul"),
        (torch.ones(2, 3), torch.ones(3, 2), "int32", "unknown accumulator 'int32'"),
        (torch.ones(2, 3).double(), torch.ones(3, 2).double(), "hopper", "float64"),
        (torch.ones(2, 3), torch.ones(3, 2).half(), "hopper", "float16"),
    ],
)
def test_bad_input(x, other, accumulator, message):
    with pytest.raises(pt2mx.MXError, match=re.escape(message)):
        ops.matmul_accumulated(x, other, None, accumulator)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "args", "message"),
    [
        ((1, 3, 8), (4, 3, 3), None, ([1, 1], [0], [1], 1), "must be of one to three dimensions of a kernel"),
        ((1, 3, 8), (4, 5, 3), None, ([1], [0], [1], 1), "of 3 channels does not fit a weight (4, 5, 3) in 1 groups"),
        ((1, 3, 2), (4, 3, 3), None, ([1], [0], [1], 1), "is smaller than the kernel (3,)"),
        ((1, 3, 8), (4, 3, 3), (3,), ([1], [0], [1], 1), "bias of shape (3,)"),
    ],
)
def test_bad_convolutions(x, weight, bias, args, message):
    tensors = torch.ones(x), torch.ones(weight), None if bias is None else torch.ones(bias)
    with pytest.raises(pt2mx.MXError, match=re.escape(message)):
        ops.convolution_accumulated(*tensors, *args, "hopper")


def test_bad_biases():
    with pytest.raises(pt2mx.MXError, match=re.escape("bias (5,) must broadcast to the result (2, 4)")):
        ops.matmul_accumulated(torch.ones(2, 3), torch.ones(3, 4), torch.ones(5), "hopper")
    with pytest.raises(pt2mx.MXError, match=re.escape("bias of shape (5,)")):
        ops.linear_accumulated(torch.ones(2, 3), torch.ones(4, 3), torch.ones(5), "hopper")
