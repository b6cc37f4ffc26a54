"""The C++ kernels that quantize activations and layer norms: the same bits as an activation and its quantization in two
steps, and activations as close to exact values as torch's."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import FORMATS, MXSpec
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import activations, quantize
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.modes import ROUNDINGS
from tests import kernel_calls
from tests.compare import differing, same
from tests.cpu_kernels import DTYPES
from tests.kernel_calls import ByArguments
from tests.oracle import NARROW, modes_of
from tests.random_values import random_values

cpu = ByArguments(activations)
#: of rows and blocks: one in registers, several, shorter than a vector, ragged, of no whole vectors, longer than a row
LAYOUTS = (((7, 96), 32), ((3, 160), 64), ((5, 9), 32), ((5, 100), 32), ((4, 20), 4), ((3, 70), 48), ((2, 40), 10**6))


@pytest.mark.diagonal
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("name", NARROW)
def test_every_element(name, activation):
    for i, scale_mode in enumerate(modes_of(name)):
        for j, (shape, block) in enumerate(LAYOUTS):
            dtype, target = DTYPES[i % 3], DTYPES[j % 3]
            spec = MXSpec(name, block, 1, scale_mode)
            x = torch.cat([random_values(shape, dtype, kind) for kind in range(5)])
            got = cpu.activation_fake_quantize(x, activation, spec, target)
            activated = x.where(~(x < 0), 0) if activation == "relu" else x  # torch's relu drops some signs on AArch64
            want = reference.fake_quantize(activated, spec)
            assert not differing(got, want.to(target)).any(), (scale_mode, shape, block, dtype, target)


@pytest.mark.parametrize("name", FORMATS)
def test_every_magnitude(name):
    """Blocks from subnormal to overflowing, whose scales and values are not normal numbers."""
    x = torch.randn(280, 64) * torch.exp2(torch.arange(-150.0, 130)).unsqueeze(1)
    x[::7, 5] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        for scale_mode in ("floor", "ceil"):
            spec = MXSpec(name, 32, 1, scale_mode)
            want = reference.fake_quantize(x.to(dtype), spec)
            for target in (dtype, torch.bfloat16):
                assert same(cpu.activation_fake_quantize(x.to(dtype), "none", spec, target), want.to(target))


@pytest.mark.parametrize("rounding", [r for r in ROUNDINGS if not ROUNDINGS[r].random])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rounding_of_norms(rounding, dtype):
    x, residual = torch.randn(2, 33, 100).to(dtype)
    weight, bias = torch.randn(2, 100).to(dtype)
    for scale_mode in modes_of("fp6_e2m3"):
        spec = MXSpec("fp6_e2m3", 32, 1, scale_mode, rounding)
        normed, got = cpu.layer_norm_fake_quantize(x, residual, weight, bias, 1e-5, spec, torch.bfloat16)
        assert same(got, reference.fake_quantize(normed, spec).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [5, 64, 100, 384])
def test_norms_are_as_exact_as_torch_s(dtype, k):
    x, residual = (torch.randn(2, 50, k) + 3).to(dtype)
    weight, bias = torch.randn(2, k)
    for added in (None, residual):
        for of_norm in ((None, None), (weight.to(dtype), bias.to(dtype)), (weight, bias), (weight, None)):
            if dtype == torch.float16 and of_norm[0] is not None and of_norm[0].dtype != dtype:
                continue  # torch has no such norm
            args = x, added, *of_norm, 1e-5, MXSpec("int8", 32, 1), dtype
            normed, _ = cpu.layer_norm_fake_quantize(*args)
            theirs, _ = kernel_calls.layer_norm_fake_quantize(*args)[0].decompose()
            summed = x if added is None else x + added
            exact = F.layer_norm(summed.double(), (k,), *(None if t is None else t.double() for t in of_norm), 1e-5)
            assert (normed - exact).norm() <= 1.2 * (theirs - exact).norm()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_as_exact_as_torch_s(activation, dtype):
    """Counts the values that are quantized differently from exact ones."""
    x, spec = (3 * torch.randn(4096, 96)).to(dtype), MXSpec("int8", 32, 1)
    exact = reference.fake_quantize(ACTIVATIONS[activation](x.double()).to(dtype), spec)
    ours = cpu.activation_fake_quantize(x, activation, spec, dtype)
    theirs = reference.fake_quantize(ACTIVATIONS[activation](x), spec)
    assert (ours != exact).sum() <= 1.2 * (theirs != exact).sum() + 8
    assert (ours != exact).float().mean() < 1e-3


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations_of_special_values(activation):
    x = torch.tensor([-0.0, 0.0, -1e-30, 1e-42, 5.53, -5.53, 100.0, -100.0, 1e30, -1e30, 1e38, -1e38]).unsqueeze(1)
    spec = MXSpec("fp8_e4m3", 1, 1)
    got, want = cpu.activation_fake_quantize(x, activation, spec, x.dtype), ACTIVATIONS[activation](x)
    torch.testing.assert_close(got, want, rtol=0.07, atol=1e-6)
    # of -0 torch's GELU is 0 on AVX2, and its ReLU on AArch64
    assert torch.equal(got[:2].signbit(), x[:2].signbit())
    x = torch.tensor([[torch.nan], [torch.inf]])
    assert cpu.activation_fake_quantize(x, activation, spec, x.dtype).isnan().all()


def test_one_row_of_many_values_and_many_rows():
    for shape in ((1, 40000), (70000,), (1, 40007), (3000, 33)):
        x = torch.randn(shape)
        spec = MXSpec("fp4_e2m1", 32, x.dim() - 1)
        want = reference.fake_quantize(x, spec)
        assert same(cpu.activation_fake_quantize(x, "none", spec, x.dtype), want)
        assert same(ByArguments(quantize).fake_quantize(x, spec), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_scale(dtype):
    x = (torch.randn(40, 100) * torch.exp2(torch.arange(-30.0, 10)).unsqueeze(1)).to(dtype)
    for name in ("fp8_e4m3", "fp4_e2m1", "fp6_e2m3", "int8", "int8_full"):
        spec = MXSpec(name, 32, 1)
        normed, got = cpu.layer_norm_fake_quantize(x, x, None, None, 1e-5, spec, torch.bfloat16)
        assert torch.equal(got, reference.fake_quantize(normed, spec).bfloat16())
        got = cpu.activation_fake_quantize(x, "relu", spec, dtype)
        assert torch.equal(got, reference.fake_quantize(x.relu(), spec))
        gelu = reference.fake_quantize(F.gelu(x.double()).to(dtype), spec)
        assert (cpu.activation_fake_quantize(x, "gelu", spec, dtype) != gelu).float().mean() < 2e-3


@pytest.mark.compiled
@pytest.mark.slow_except("avx2")
def test_other_processors(on_other_processors):
    on_other_processors(__file__, "every_scale")


@pytest.mark.parametrize("length", [1, 17, 33, 768])
@pytest.mark.parametrize("value", [3.3, 0.1, 10000.1])
def test_a_norm_of_equal_values_is_zero(value, length):
    x = torch.full((2, length), value)
    normed, quantized = cpu.layer_norm_fake_quantize(x, None, None, None, 1e-12, MXSpec("fp8_e4m3", axis=1), x.dtype)
    assert not normed.any() and not quantized.any()
