"""Compiled and portable programs with scales other than E8M0 give the bits of eager, without calls of pt2mx."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import pt2mx
from pt2mx.modes import FLOAT_SCALE_MODES
from tests.compare import same
from tests.float_scale_operators import NAMES, through_float_scale_operators, values
from tests.graph import namespaces
from tests.models import module_of

pytestmark = pytest.mark.usefixtures("compiler")


def check_compiled(x, *args, **options):
    compiled = torch.compile(through_float_scale_operators, fullgraph=True, **options)
    got, (code, *_) = run_and_get_code(compiled, x, *args)
    assert not [line for line in code.splitlines() if "torch.ops.pt2mx" in line and line.lstrip()[0] != "#"]
    for a, b in zip(got, through_float_scale_operators(x, *args), strict=True):
        assert same(a, b), args


@pytest.mark.compiled
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in NAMES[::4])) for name in NAMES]
)
def test_compiled(name):
    check_compiled(values(), name)


@pytest.mark.compiled
@pytest.mark.parametrize("mode", FLOAT_SCALE_MODES)
def test_modes(mode):
    check_compiled(values(), "nvfp4", mode)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    check_compiled(values().to(dtype), "nvfp4")


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3{16x32}(f32)"])
def test_dynamic_sizes(name):
    compiled = torch.compile(through_float_scale_operators, fullgraph=True, dynamic=True)
    for shape in ((40, 70), (33, 20), (5, 64)):
        x = values(*shape) if shape[0] > 8 and shape[1] > 50 else torch.randn(shape)
        for a, b in zip(compiled(x, name), through_float_scale_operators(x, name), strict=True):
            assert same(a, b), shape


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3{16x32}(f32)"])
def test_packages(name, tmp_path):
    x, sizes = values(), ({0: torch.export.Dim("rows", min=2, max=99)},)
    model = module_of(lambda self, x: through_float_scale_operators(x, name))
    program = torch.export.export(model, (x,), dynamic_shapes=sizes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "p.pt2"))
    package = torch._inductor.aoti_load_package(str(tmp_path / "p.pt2"))
    for rows in (2, 16, 40):
        for a, b in zip(package(x[:rows]), through_float_scale_operators(x[:rows], name), strict=True):
            assert same(a, b), rows


@pytest.mark.compiled
@pytest.mark.slow_except("nvfp4", "int8{32}(f16)", "fp8_e4m3{16x32}(f32)")
@pytest.mark.parametrize("name", NAMES)
def test_portable(name):
    x = values()
    program = torch.export.export(module_of(lambda self, x: through_float_scale_operators(x, name)), (x,))
    assert "pt2mx" in namespaces(program.graph_module)
    portable = pt2mx.make_portable(program)
    assert "pt2mx" not in namespaces(portable.graph_module)
    for a, b in zip(portable.module()(x), through_float_scale_operators(x, name), strict=True):
        assert same(a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", FLOAT_SCALE_MODES)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_on_a_gpu(name, mode):
    """Searching modes one operator at a time: of all of them in one kernel Triton 3.6 loses an operand."""
    x = values().cuda()
    if pt2mx.parse(name).scale_format.is_power_of_two:
        check_compiled(x, name)
    elif mode not in ("four_six", "mse"):
        check_compiled(x, name, mode)
    else:
        spec = pt2mx.parse(name, scale_mode=mode)
        t = pt2mx.tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
        for function in (pt2mx.quantize_mx, pt2mx.fake_quantize_mx):
            got = torch.compile(function, fullgraph=True)(x, spec, tensor_scale=t)
            want = function(x, spec, tensor_scale=t)
            assert all(same(a, b) for a, b in zip(got, want, strict=True))
