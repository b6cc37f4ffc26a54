"""Values do not depend on torch's default dtype and device, nor on tracing when a kernel is first used."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import pt2mx
from pt2mx import ELEMENTS, MXSpec
from pt2mx.kernels import elements, float_scales, reference
from pt2mx.kernels.cpu import linear as cpu_linear
from pt2mx.kernels.cpu import quantize as cpu_quantize
from pt2mx.kernels.inductor import cpu as inductor_cpu
from pt2mx.ops.inductor import DECOMPOSITIONS
from tests.compare import same
from tests.kernel_calls import ByArguments

TEXTS = ("nvfp4(mse)", "fp8_e4m3{16}(f32)", "int4{16}(half_away,bf16)", "mxfp4(half_up)")


def empty_caches() -> None:
    of_elements = elements.values_of_codes, cpu_linear.table_of, cpu_linear._isa
    for function in (*of_elements, cpu_quantize.float_scale_of, cpu_quantize.spec_of):
        function.cache_clear()


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request):
    empty_caches()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("text", TEXTS)
def test_default_dtype(text, default_dtype):
    spec = pt2mx.parse(text, axis=1)
    x = torch.randn(8, 64, dtype=torch.float32)
    t = float_scales.tensor_scale(x, spec) if spec.scale_format.tensor else None
    for module in (ByArguments(cpu_quantize), reference):
        scale, data = module.quantize(x, spec, None, tensor_scale=t)
        y = module.dequantize(data, scale, spec, torch.float32, 64, tensor_scale=t)
        torch.set_default_dtype(torch.float32)
        expected = reference.quantize(x, spec, tensor_scale=t)
        assert same(scale, expected[0]) and same(data, expected[1])
        assert same(y, reference.dequantize(data, scale, spec, torch.float32, 64, tensor_scale=t))
        torch.set_default_dtype(default_dtype)


def test_compiled_code_decodes_to_float32(default_dtype):
    codes = torch.arange(16, dtype=torch.int32)
    assert same(inductor_cpu.decode(codes, ELEMENTS["fp4_e2m1"]), elements.decode(codes, ELEMENTS["fp4_e2m1"]))


def test_exact_conversion_of_scales(default_dtype):
    scale, data = pt2mx.quantize_mx(torch.randn(2, 32, dtype=torch.float32), "mxfp4")
    nv_scale, t = pt2mx.mx_to_nv_scales(data, scale)
    assert same(pt2mx.dequantize_mx(data, nv_scale, "nvfp4", tensor_scale=t), pt2mx.dequantize_mx(data, scale, "mxfp4"))


def test_default_device():
    empty_caches()
    with torch.device("meta"):
        isa = cpu_linear.isa_for(MXSpec("int8"), 64)
        number = cpu_quantize.float_scale_of(pt2mx.parse("nvfp4")).largest
    empty_caches()
    assert isa == cpu_linear.isa_for(MXSpec("int8"), 64) and number == 0x7E


def test_first_use_in_a_decomposition():
    """A process that compiles a program before it runs a kernel asks for the matrix instructions while it traces."""
    scale, data = pt2mx.quantize_mx(torch.randn(32, 64), "mxint8")
    args = data, scale, None, "int8", 32, 0, torch.float32, None, None, None
    empty_caches()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(256, 64).bfloat16())
        DECOMPOSITIONS[torch.ops.pt2mx.linear_mx.default](x, *args)
    x = torch.randn(2, 64)
    y = torch.ops.pt2mx.linear_mx(x, *args)
    torch.testing.assert_close(y, x @ pt2mx.dequantize_mx(data, scale, "mxint8").T)
