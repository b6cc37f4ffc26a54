"""On an NVIDIA GPU: every kernel equals the CPU's reference to the bit, eager and compiled."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from pt2mx import FORMATS, dequantize_mx, fake_quantize_mx, ops, quantize_mx
from pt2mx.modes import SCALE_MODES
from tests.pt2mx.test_inductor import through_all_operators

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("compiler")]


def same(got, want):
    got = got.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return got.shape == want.shape and bool(((got.view(integer) == want.view(integer)) | (want != want)).all())


def every_pattern(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).unsqueeze(1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_operators_equal_the_cpu(name, compiled):
    run = torch.compile(through_all_operators, fullgraph=True, dynamic=False) if compiled else through_all_operators
    for shape, axis in [((4, 64), -1), ((3, 70), -1), ((3, 70, 5), 1), ((2, 40, 6, 6), 1)]:
        x = torch.randn(shape)
        for got, want in zip(run(x.cuda(), name, axis), through_all_operators(x, name, axis), strict=True):
            assert same(got, want)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale_mode", SCALE_MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype, scale_mode, compiled):
    def run(x):
        fakes = [fake_quantize_mx(x, name, 1, scale_mode=scale_mode) for name in FORMATS]
        return *fakes, *quantize_mx(x, "fp8_e4m3", 1, scale_mode=scale_mode)

    x = every_pattern(dtype)
    function = torch.compile(run, fullgraph=True) if compiled else run
    for got, want in zip(function(x.cuda()), run(x), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_code_and_scale(compiled):
    data = torch.arange(256, dtype=torch.uint8).expand(256, -1).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)

    def run(data, scale):
        return tuple(dequantize_mx(data, scale, name, 256) for name in ("fp8_e4m3", "fp8_e5m2", "int8"))

    function = torch.compile(run, fullgraph=True) if compiled else run
    for got, want in zip(function(data.cuda(), scale.cuda()), run(data, scale), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("name", FORMATS)
def test_opcheck(name):
    x = torch.randn(4, 70, device="cuda", requires_grad=True)
    opcheck(ops.quantize_mx, (x, name, 32))
    opcheck(ops.fake_quantize_mx, (x, name, 32))
    scale, data = ops.quantize_mx(x, name, 32)
    opcheck(ops.dequantize_mx, (data, scale, name, 32, torch.bfloat16, -1, 70))


def test_one_triton_kernel_and_no_opaque_call():
    def run(x):
        return fake_quantize_mx(torch.nn.functional.gelu(x), "mxfp8") + 1

    _, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), torch.randn(256, 256, device="cuda"))
    assert "torch.ops.pt2mx" not in code and code.count("@triton.jit") == 1
