"""The Inductor decompositions against eager, to the bit."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from pt2mx import FORMATS, dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from tests.compare import same
from tests.operators import outputs_of_a_package, through_all_operators
from tests.oracle import modes_of

pytestmark = pytest.mark.usefixtures("compiler")


#: one format of each width and of each kind of special values is compiled by default
_SLOW = {"fp8_e4m3", "fp6_e2m3"}


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *(pytest.param(name, False, marks=[pytest.mark.compiled] * (name in _SLOW)) for name in FORMATS),
        pytest.param("fp6_e2m3", True, marks=pytest.mark.compiled),
    ],
)
def test_equals_eager(name, dynamic):
    compiled = torch.compile(through_all_operators, fullgraph=True, dynamic=dynamic)
    shape, axis = ((3, 70), -1) if not dynamic else ((5, 70, 4), 1)
    x = torch.randn(shape)
    for got, want in zip(compiled(x, name, axis), through_all_operators(x, name, axis), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "example"),
    [
        pytest.param("fp8_e4m3", 2, marks=pytest.mark.slow),
        pytest.param("fp6_e3m2", 40, marks=pytest.mark.slow),
        pytest.param("fp4_e2m1", 64, marks=pytest.mark.slow),
    ],
)
def test_packages_take_other_lengths_than_the_example(name, example, tmp_path):
    for got, want in outputs_of_a_package(name, "cpu", example, tmp_path / "operators.pt2"):
        assert torch.equal(got, want)


@pytest.mark.compiled
def test_compiled_takes_other_lengths():
    """With guards there is code of its own for one block."""
    compiled = torch.compile(through_all_operators, fullgraph=True, dynamic=True)
    for n in (20, 70):
        x = torch.randn(3, n, 5)
        for got, want in zip(compiled(x, "fp8_e4m3", 1), through_all_operators(x, "fp8_e4m3", 1), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(("shape", "axis"), [((70,), 0), pytest.param((2, 40, 6, 6), 1, marks=pytest.mark.compiled)])
def test_ragged_last_blocks_are_written_whole(shape, axis):
    """torch 2.13's C++ loop splitting drops the values beyond the last whole block of a fused consumer."""
    x = torch.randn(shape)
    compiled = torch.compile(through_all_operators, fullgraph=True)
    for got, want in zip(compiled(x, "mxfp4", axis), through_all_operators(x, "mxfp4", axis), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("dtype", "scale_modes"),
    [
        pytest.param(torch.float32, tuple(modes_of("fp8_e5m2")), marks=pytest.mark.compiled),
        (torch.bfloat16, ("floor",)),
        pytest.param(torch.float16, ("floor",), marks=pytest.mark.compiled),
    ],
)
def test_every_exponent_and_special_value(dtype, scale_modes):
    """Every 16-bit pattern, in blocks of one: Inf, NaN, subnormals, signed zeros."""
    kind = dtype if dtype != torch.float32 else torch.bfloat16
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(kind).to(dtype).unsqueeze(1)

    def run(x):
        return *(fake_quantize_mx(x, "fp8_e5m2", 1, scale_mode=mode) for mode in scale_modes), *quantize_mx(
            x, "int8", 1
        )

    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert same(got, want)


@pytest.mark.parametrize(
    ("scale_mode", "roundings"),
    [
        ("floor", ("half_away", "up", "stochastic")),
        *(pytest.param(m, (r,), marks=pytest.mark.slow) for m in SCALE_MODES for r in ROUNDINGS),
    ],
)
@pytest.mark.compiled_cases("floor-roundings0")
def test_every_rounding_of_every_bf16_pattern(scale_mode, roundings):
    """By default three of one format; every format with every mode and rounding among the slow tests."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).unsqueeze(1)
    names = ("fp4_e2m1",) if len(roundings) > 1 else [name for name in FORMATS if scale_mode in modes_of(name)]

    def run(x):
        return [
            fake_quantize_mx(x, name, 1, scale_mode=scale_mode, rounding=rounding, seed=7)
            for name in names
            for rounding in roundings
        ]

    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert same(got, want)


@pytest.mark.compiled
def test_every_code_and_scale():
    data = torch.arange(256, dtype=torch.uint8).expand(256, -1).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)

    def run(data, scale):
        return [dequantize_mx(data, scale, name, 256) for name in ("fp8_e4m3", "fp8_e5m2", "int8")]

    for got, want in zip(torch.compile(run, fullgraph=True)(data, scale), run(data, scale), strict=True):
        assert same(got, want)


def test_no_opaque_call_is_left_and_one_kernel_does_it():
    def run(x):
        return fake_quantize_mx(torch.nn.functional.gelu(x), "mxfp8") + 1

    _, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), torch.randn(64, 64))
    assert "torch.ops.pt2mx" not in code
    assert code.count("async_compile.cpp_pybinding") == 1


@pytest.mark.compiled
def test_gradient_through_a_compiled_fake_quantize():
    x = torch.randn(4, 64, requires_grad=True)
    torch.compile(lambda x: (fake_quantize_mx(x, "mxfp4") * 3).sum(), fullgraph=True)(x).backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.compiled
def test_decompositions_are_in_the_table_of_a_process_that_compiled_before_the_import(run_python):
    code = """
import torch
torch.compile(lambda x: x + 1)(torch.ones(3))
import pt2mx
from torch._inductor.utils import run_and_get_code
_, (code,) = run_and_get_code(torch.compile(lambda x: pt2mx.fake_quantize_mx(x, "mxfp4")), torch.ones(2, 32))
print("torch.ops.pt2mx" in code)
"""
    assert run_python(code).split() == ["False"]


def test_compile_caches_know_the_version_of_the_decompositions():
    assert "pt2mx-" in torch.compiler.config.cache_key_tag
