"""`activation_fake_quantize_mx`, `layer_norm_fake_quantize_mx`: schemas, shapes, errors, gradients, values."""

import re

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from pt2mx import MXError, fake_quantize_mx
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.ops.activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx
from tests.compare import same
from tests.threads import on_threads

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantized(x, dtype=None):
    return fake_quantize_mx(x, "fp8_e4m3", 32, -1).to(dtype or x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 33), (4,), (0, 32), (2, 0), (2, 1)])
def test_shapes(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    for target in (None, torch.bfloat16):
        got = activation_fake_quantize_mx(x, "relu", "fp8_e4m3", 32, "floor", "even", target_dtype=target)
        assert same(got, quantized(x.relu(), target)) and got.is_contiguous()
        normed, got = layer_norm_fake_quantize_mx(
            x, x, None, None, 1e-5, "fp8_e4m3", 32, "floor", "even", target_dtype=target
        )
        torch.testing.assert_close(normed, F.layer_norm(x + x, shape[-1:]), rtol=1e-2, atol=1e-4)
        assert same(got, quantized(normed, target)) and got.is_contiguous()


def test_a_scalar():
    assert activation_fake_quantize_mx(torch.tensor(1.1), "none", "fp4_e2m1", 32, "floor", "even") == 1
    with pytest.raises(MXError, match=re.escape("x has no dimension; pass x.view(1)")):
        layer_norm_fake_quantize_mx(torch.tensor(1.1), None, None, None, 1e-5, "fp4_e2m1", 32, "floor", "even")


def test_strides_of_any_kind():
    x, weight = torch.randn(64, 6, 4).permute(2, 1, 0), torch.randn(128)[::2]
    got = activation_fake_quantize_mx(x, "silu", "int8", 32, "floor", "even")
    assert same(got, activation_fake_quantize_mx(x.contiguous(), "silu", "int8", 32, "floor", "even"))
    args = weight, weight, 1e-5, "int8", 32, "floor", "even"
    got = layer_norm_fake_quantize_mx(x, x, *args)
    want = layer_norm_fake_quantize_mx(*(x.contiguous(),) * 2, *(weight.contiguous(),) * 2, *args[2:])
    assert all(map(same, got, want))


def test_elements_without_kernels_of_their_own():
    x = torch.randn(3, 64)
    want = fake_quantize_mx(F.gelu(x), "int12", 32, -1)
    assert same(activation_fake_quantize_mx(x, "gelu", "int12", 32, "floor", "even"), want)


def test_on_other_devices():
    x = torch.randn(2, 64, device="meta")
    assert (
        activation_fake_quantize_mx(x, "gelu", "int8", 32, "floor", "even", target_dtype=torch.bfloat16).dtype
        == torch.bfloat16
    )
    assert [t.shape for t in layer_norm_fake_quantize_mx(x, None, None, None, 1e-5, "int8", 32, "floor", "even")] == [
        x.shape
    ] * 2


def test_a_residual_of_another_dtype():
    """As a product under autocast gives it."""
    x, residual = torch.randn(3, 64).bfloat16(), torch.randn(3, 64)
    normed, got = layer_norm_fake_quantize_mx(x, residual, None, None, 1e-5, "fp8_e4m3", 32, "floor", "even")
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (64,)))
    assert normed.dtype == torch.float32 and same(got, quantized(normed))


def test_threads_do_not_change_bits():
    x = torch.randn(900, 320)

    def results():
        norm = layer_norm_fake_quantize_mx(x, x, x[0], x[1], 1e-5, "int8", 32, "floor", "even")
        return *norm, activation_fake_quantize_mx(x, "gelu", "int8", 32, "floor", "even")

    assert all(map(torch.equal, *on_threads(results, 1, 2)))


@pytest.mark.compiled
def test_opcheck():
    x = torch.randn(3, 5, 64, requires_grad=True)
    weight = torch.randn(64, requires_grad=True)
    for activation in ACTIVATIONS:
        opcheck(activation_fake_quantize_mx, (x, activation, "fp4_e2m1", 32, "even", "even", torch.bfloat16))
    opcheck(layer_norm_fake_quantize_mx, (x, x.detach(), weight, weight, 1e-5, "fp4_e2m1", 32, "floor", "even"))
    opcheck(layer_norm_fake_quantize_mx, (x, None, weight, None, 1e-5, "fp4_e2m1", 32, "ceil", "even", torch.bfloat16))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_activations(activation):
    x, grad = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64)
    (want,) = torch.autograd.grad(ACTIVATIONS[activation](x), x, grad)
    (got,) = torch.autograd.grad(activation_fake_quantize_mx(x, activation, "int8", 32, "floor", "even"), x, grad)
    torch.testing.assert_close(got, want)


def test_gradients_of_norms():
    x, residual, weight, bias = given = [torch.randn(s, requires_grad=True) for s in ((4, 64), (4, 64), (64,), (64,))]
    grads = torch.randn(2, 4, 64)
    normed = F.layer_norm(x + residual, (64,), weight, bias)
    want = torch.autograd.grad([normed, normed], given, list(grads), retain_graph=True)
    got = torch.autograd.grad(
        layer_norm_fake_quantize_mx(*given, 1e-5, "int8", 32, "floor", "even"), given, list(grads)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    normed, _ = layer_norm_fake_quantize_mx(
        x, None, None, None, 1e-5, "int8", 32, "floor", "even", target_dtype=torch.bfloat16
    )
    want = torch.autograd.grad(F.layer_norm(x, (64,)), x, grads[0])
    torch.testing.assert_close(torch.autograd.grad(normed, x, grads[0]), want)


@pytest.mark.compiled
def test_dynamic_rows_compile():
    def layer(x):
        normed, got = layer_norm_fake_quantize_mx(x * 2, x, None, None, 1e-5, "fp6_e2m3", 32, "floor", "even")
        return activation_fake_quantize_mx(got + normed, "gelu", "fp4_e2m1", 32, "floor", "even") + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (3, 8):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(2, 32), "tanh", "int8", 32, "floor", "even"), "activation='tanh' must be one of none, gelu"),
        ((torch.ones(2, 32), "gelu", "int8", 32, "floor", "stochastic"), "not rounded 'stochastic' where they are"),
        ((torch.ones(2, 32), "gelu", "int8", 0, "floor", "even"), "block_size"),
        (
            (torch.ones(2, 32, dtype=torch.int64), "gelu", "int8", 32, "floor", "even"),
            "cannot quantize a tensor of dtype torch.int64",
        ),
        ((torch.ones(2, 32), "gelu", "int8", 32, "floor", "even", torch.int8), "target_dtype=torch.int8 must be"),
    ],
)
def test_what_is_no_activation(args, message):
    with pytest.raises(MXError, match=re.escape(message)):
        activation_fake_quantize_mx(*args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(32), None, None), "the residual (32,) must have the shape of x, (2, 32)"),
        ((None, torch.ones(32, device="meta"), None), "weight is on meta and x on cpu: move one"),
        ((None, None, torch.ones(31)), "bias of shape (31,) must be (32,)"),
        ((None, torch.ones(32, dtype=torch.float64), None), "weight of torch.float64 must be in the dtype of the sum"),
    ],
)
def test_what_is_no_norm(args, message):
    with pytest.raises(MXError, match=re.escape(message)):
        layer_norm_fake_quantize_mx(torch.ones(2, 32), *args, 1e-5, "fp4_e2m1", 32, "floor", "even")
