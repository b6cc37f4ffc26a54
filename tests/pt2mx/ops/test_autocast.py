"""`torch.autocast` around matmuls with packed weights: it casts them like linear layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2mx
from pt2mx import MXQuantizer, dequantize_mx, get_default_mx_quantization_config, lower_to_inductor, quantize_mx
from pt2mx.kernels.gpu.mma_layout import to_mma_layout
from pt2mx.ops.linear import linear_mx, linear_mx_mma_layout
from tests.compare import relative_error
from tests.models import module_of

DTYPES = (torch.bfloat16, torch.float16)


def convolution_then_linear(bias):
    """The convolution gives the linear layer an input of autocast's dtype; the bias keeps its own."""
    conv, first = nn.Conv2d(3, 8, 3, bias=bias), nn.Linear(288, 16, bias=bias)
    return nn.Sequential(conv, nn.Flatten(), first, nn.ReLU(), nn.Linear(16, 8, bias=bias))


def products():
    """addmm, mm and matmul, whose weights are stored transposed."""

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight) + torch.mm(x, self.weight) + x @ self.weight

    return module_of(forward, weight=nn.Parameter(torch.randn(64, 16)), bias=nn.Parameter(torch.randn(16)))


MODELS = {
    "convolution, linear, bias": (lambda: convolution_then_linear(True), (2, 3, 8, 8)),
    "convolution, linear": (lambda: convolution_then_linear(False), (2, 3, 8, 8)),
    "addmm, mm, matmul": (products, (4, 64)),
}


def converted_model(name, activation):
    make, shape = MODELS[name]
    x = torch.randn(shape)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp8", activation))
    exported = torch.export.export(make().eval(), (x,)).module()
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer)), x


@torch.no_grad()
def check(run, converted, x, dtype):
    """The reference is the converted model under autocast, whose matmuls are torch's."""
    with torch.autocast("cpu", dtype):
        got, want = run(x), converted(x)
    assert got.dtype == want.dtype == dtype
    assert relative_error(got, want) < 8 * torch.finfo(dtype).eps


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["mxfp8", None])
@pytest.mark.parametrize("name", MODELS)
def test_lowered_models(name, activation, dtype):
    converted, x = converted_model(name, activation)
    lowered = lower_to_inductor(converted)
    check(lowered, converted, x, dtype)
    with torch.no_grad():
        assert lowered(x).dtype == torch.float32  # outside of it


@pytest.mark.compiled
def test_compiled(compiler):
    converted, x = converted_model("convolution, linear, bias", None)
    check(torch.compile(lower_to_inductor(converted)), converted, x, torch.bfloat16)


@pytest.mark.parametrize("autocast", DTYPES)
@pytest.mark.parametrize("given", [torch.float32, *DTYPES])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_any_dtypes_of_the_operands(autocast, given, bias):
    scale, data = quantize_mx(torch.randn(9, 70), "mxfp4")
    x, bias = torch.randn(3, 70).to(given), None if bias is None else torch.randn(9).to(bias)
    weight = dequantize_mx(data, scale, "mxfp4", length=70)
    with torch.autocast("cpu", autocast):
        got, want = linear_mx(x, data, scale, bias, "fp4_e2m1", 32, 0), F.linear(x, weight, bias)
    assert got.dtype == autocast
    torch.testing.assert_close(got, want, rtol=4 * torch.finfo(autocast).eps, atol=0.1)
    with torch.autocast("cpu", autocast, enabled=False):
        assert linear_mx(x, data, scale, None, "fp4_e2m1", 32, 0).dtype == given


def test_gradient_passes_through_the_casts():
    scale, data = quantize_mx(torch.randn(9, 64), "mxfp8")
    x, bias = torch.randn(3, 64, requires_grad=True), torch.randn(9, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear_mx(x, data, scale, bias, "fp8_e4m3", 32, 0).sum().backward()
    assert x.grad.dtype == bias.grad.dtype == torch.float32
    want = dequantize_mx(data, scale, "mxfp8").sum(0).expand(3, -1)
    torch.testing.assert_close(x.grad, want, rtol=0.02, atol=0.1)
    assert torch.equal(bias.grad, torch.full((9,), 3.0))


@pytest.mark.parametrize("autocast", DTYPES)
def test_fragments_compute_in_bfloat16(autocast):
    scale, data = quantize_mx(torch.randn(20, 64), "mxfp8")
    fragments = to_mma_layout(data, scale, pt2mx.MXSpec("fp8_e4m3"))
    x, bias = torch.randn(3, 64), torch.randn(20)
    with torch.autocast("cpu", autocast):
        got = linear_mx_mma_layout(x, *fragments, bias, "fp8_e4m3", 20, 0)
    want = linear_mx_mma_layout(x.bfloat16(), *fragments, bias.bfloat16(), "fp8_e4m3", 20, 0)
    assert got.dtype == autocast and torch.equal(got, want.to(autocast))
