"""Compare FP8 rows on an NVIDIA GPU with their definition, to the bit, and their matmuls with float64."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import MXSpec, fake_quantize_mx
from pt2mx.kernels import fp8_rowwise
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.fp8_rowwise import E4M3, ROOMS
from tests.kernel_calls import ByArguments

pytestmark = pytest.mark.cuda

SHAPES = [(37, 96), (64, 384), (130, 1024), (33, 4096), (16, 8192), (3, 65536)]


@pytest.fixture
def gpu():
    from pt2mx.kernels.gpu import fp8_rowwise as module

    return ByArguments(module)


def rows_of_every_kind(shape):
    m, k = shape
    powers = torch.exp2(torch.randint(-4, 5, (m, k // BLOCK), device="cuda").float())
    x = (torch.randn(shape, device="cuda") * powers.repeat_interleave(BLOCK, 1)).bfloat16()
    x[0, 5], x[1, 3], x[2] = torch.nan, torch.inf, 0
    if m > 10:
        x[5, :BLOCK] = 0
        x[6] *= 2.0**-120
        x[7, :BLOCK] *= 2.0**-30
        x[8] *= 2.0**100
        x[9] *= 2.0**-133
    return x


def check_rows(got, want):
    (codes, scale, rest), (codes_want, scale_want, rest_want) = got, want
    unfit = (scale_want < 0).flatten(0)
    assert torch.equal(scale, scale_want)
    assert torch.equal(codes[~unfit.view(scale.shape[:-1])], codes_want[~unfit.view(scale.shape[:-1])])
    kept, kept_want = (r[unfit.view(scale.shape[:-1])] for r in (rest, rest_want))
    assert torch.equal(kept.nan_to_num(7), kept_want.nan_to_num(7))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["floor", "ceil", "rceil", "even", "mse"])
@pytest.mark.parametrize("name", ROOMS)
def test_rows(gpu, name, mode, shape):
    from pt2mx.kernels.gpu.activations import supports

    x, spec = rows_of_every_kind(shape), MXSpec(name, BLOCK, axis=1, scale_mode=mode)
    got = gpu.quantize(x, spec, "none")
    if supports(spec, x):
        check_rows(got, fp8_rowwise.quantize(x, spec, "none"))
    else:
        assert got is None and (mode == "mse" or shape == SHAPES[-1])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations(gpu, activation):
    x, spec = torch.randn(64, 1024, device="cuda").bfloat16() * 3, MXSpec("fp6_e2m3", BLOCK, axis=1)
    got, want = (module.quantize(x, spec, activation) for module in (gpu, fp8_rowwise))
    got, want = (codes.view(E4M3).float() * scale for codes, scale, _ in (got, want))
    assert ((got - want).norm() / want.norm()).item() < 1e-3


def test_gelu_of_every_bfloat16(gpu):
    """As near to the exact value as torch's."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    x = torch.where(x.isfinite() & (x.abs() < 1e30), x, 0.0).view(-1, 1).expand(-1, BLOCK).contiguous()
    codes, scale, _ = gpu.quantize(x, MXSpec("fp6_e2m3", BLOCK, axis=1), "gelu")
    exact = x.double() * 0.5 * torch.special.erfc(-x.double() * 0.5**0.5)
    want, theirs = (fake_quantize_mx(y.bfloat16(), "fp6_e2m3") for y in (exact, F.gelu(x)))
    ours = (codes.view(E4M3).float() * scale)[:, 0]
    assert (ours != want[:, 0]).sum() <= (theirs != want)[:, 0].sum()


@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(gpu, affine, shape):
    x, residual = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    weight, bias = torch.randn(2, shape[1], device="cuda").bfloat16() if affine else (None, None)
    spec = MXSpec("fp4_e2m1", BLOCK, axis=1)
    for added in (None, residual):
        normed, *rows = gpu.layer_norm_quantize(x, added, weight, bias, 1e-5, spec)
        want = F.layer_norm(x if added is None else x + added, shape[1:], weight, bias, 1e-5)
        assert ((normed.float() - want.float()).norm() / want.float().norm()).item() < 1e-3
        check_rows(rows, fp8_rowwise.quantize(normed, spec, "none"))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(37, 80, 96), (300, 1024, 512), (64, 256, 4096), (1, 16, 32), (0, 16, 32)])
@pytest.mark.parametrize("name", ROOMS)
def test_matmuls(gpu, name, shape, biased):
    m, n, k = shape
    x = rows_of_every_kind((m, k)) if m > 10 else torch.randn(m, k, device="cuda").bfloat16()
    w, bias = torch.randn(n, k, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16() if biased else None
    spec = MXSpec(name, BLOCK, axis=1)
    weight, scale, _ = fp8_rowwise.quantize(w, spec, "none")
    rows = gpu.quantize(x, spec, "none")
    got = gpu.mm(*rows, weight, scale, bias)
    want = fake_quantize_mx(x, spec).double() @ fake_quantize_mx(w, spec).double().T + (bias if biased else 0)
    assert torch.equal(got.isnan(), want.bfloat16().isnan())
    for row in range(m):
        if want[row].isfinite().all() and want[row].abs().max() > 1e-30:
            assert ((got[row].double() - want[row]).norm() / want[row].norm()).item() < 3e-3
    assert all(torch.equal(gpu.mm(*rows, weight, scale, bias).nan_to_num(7), got.nan_to_num(7)) for _ in range(10))


def test_strides_of_any_kind(gpu):
    """Also strides of a norm's weight, and of the weight that multiplies rows that do not fit."""
    spec = MXSpec("fp4_e2m1", BLOCK, axis=1)
    x, residual, weight = (torch.randn(64, 40, device="cuda").bfloat16().t() for _ in range(3))
    scale, bias = weight[:2]
    got, want = (
        gpu.layer_norm_quantize(*map(layout, (x, residual, scale, bias)), 1e-5, spec)
        for layout in (lambda t: t, torch.Tensor.contiguous)
    )
    assert torch.equal(got[0], want[0])
    check_rows(got[1:], want[1:])
    rows = gpu.quantize(rows_of_every_kind((40, 64)), spec, "none")
    weight, scale, _ = gpu.quantize(torch.randn(16, 64, device="cuda").bfloat16(), spec, "none")
    bias = torch.randn(16, 2, device="cuda").bfloat16()[:, 0]
    got = gpu.mm(*rows, weight.t().contiguous().t(), scale, bias)
    assert torch.equal(got.nan_to_num(7), gpu.mm(*rows, weight, scale, bias.contiguous()).nan_to_num(7))
