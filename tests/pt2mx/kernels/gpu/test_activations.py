"""Quantization in the kernel of an activation or a layer norm on an NVIDIA GPU: the bits of `fake_quantize_mx` behind
it."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import MXSpec, fake_quantize_mx
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from tests.kernel_calls import ByArguments
from tests.pt2mx.kernels.gpu.test_fp8_rowwise import rows_of_every_kind

pytestmark = pytest.mark.cuda

SHAPES = [(3, 32), (300, 96), (37, 384), (130, 4096)]
NAMES = ("fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "int8")


@pytest.fixture
def gpu():
    from pt2mx.kernels.gpu import activations

    return ByArguments(activations)


def same_bits(a, b):
    nan = a.isnan() & b.isnan()
    return torch.equal(a.masked_fill(nan, 0).view(torch.int16), b.masked_fill(nan, 0).view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["floor", "even"])
@pytest.mark.parametrize("name", NAMES)
def test_values(gpu, name, mode, shape):
    spec = MXSpec(name, BLOCK, axis=1, scale_mode=mode)
    for x in (rows_of_every_kind(shape), torch.randn(shape, device="cuda").bfloat16()):
        assert gpu.module.supports(spec, x)
        assert same_bits(gpu.activation_fake_quantize(x, "none", spec, x.dtype), fake_quantize_mx(x, spec))
        normed, quantized = gpu.layer_norm_fake_quantize(x, x, x[0], x[0], 1e-5, spec, x.dtype)
        assert same_bits(quantized, fake_quantize_mx(normed, spec))


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activations(gpu, activation):
    x, spec = torch.randn(64, 1024, device="cuda").bfloat16() * 3, MXSpec("fp8_e4m3", BLOCK, axis=1)
    got = gpu.activation_fake_quantize(x, activation, spec, x.dtype)
    want = fake_quantize_mx(ACTIVATIONS[activation](x.double()).bfloat16(), spec)
    assert ((got - want).double().norm() / want.double().norm()).item() < 1e-3


def test_gelu_of_every_bfloat16(gpu):
    """At least as near to the exact value as torch's."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    x = torch.where(x.isfinite(), x, 0.0).view(-1, 1).expand(-1, BLOCK)
    spec = MXSpec("int8", BLOCK, axis=1)  # equal values of a block have seven bits
    exact = x.double() * 0.5 * torch.special.erfc(-x.double() * 0.5**0.5)
    want, theirs = (fake_quantize_mx(y.bfloat16().contiguous(), spec) for y in (exact, F.gelu(x)))
    ours = gpu.activation_fake_quantize(x, "gelu", spec, x.dtype)
    assert (ours != want)[:, 0].sum() <= (theirs != want)[:, 0].sum()


@pytest.mark.parametrize("shape", [(5, 32), (33, 384), (40, 1024), (3, 8192)])
@pytest.mark.parametrize("affine", [False, True])
def test_norm(gpu, affine, shape):
    """As near to float64 as torch's."""
    x, residual = torch.randn(2, *shape, device="cuda").bfloat16()
    weight, bias = torch.randn(2, shape[1], device="cuda").bfloat16() if affine else (None, None)
    for added in (None, residual):
        total = x if added is None else x + added
        normed, _ = gpu.layer_norm_fake_quantize(
            x, added, weight, bias, 1e-5, MXSpec("fp8_e4m3", BLOCK, axis=1), x.dtype
        )
        given = [None if t is None else t.double() for t in (weight, bias)]
        want = F.layer_norm(total.double(), shape[1:], *given, 1e-5)
        theirs = F.layer_norm(total, shape[1:], weight, bias, 1e-5)
        assert (normed - want).norm() < 1.01 * (theirs - want).norm()


def test_strides_and_odd_places(gpu):
    spec = MXSpec("fp6_e3m2", BLOCK, axis=1)
    x = torch.randn(64, 65, device="cuda").bfloat16()
    for part in (x[:, 1:], x[:, :64], x.flatten()[1:65].view(2, 32), x[:, :64].t()):
        assert same_bits(
            gpu.activation_fake_quantize(part, "none", spec, part.dtype), fake_quantize_mx(part.contiguous(), spec)
        )
    assert gpu.activation_fake_quantize(x[:0, :64], "none", spec, x.dtype).shape == (0, 64)
