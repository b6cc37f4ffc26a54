"""The forms of the reference's steps for Inductor's C++ against the definition, to the bit, and what code they give."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import pt2mx
from pt2mx.formats import ELEMENTS
from pt2mx.kernels import elements, reference
from pt2mx.kernels.inductor import cpu as inductor_cpu
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.spec import MXSpec
from tests.compare import same
from tests.oracle import modes_of

EVERY_BF16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).float()


def values_of_a_scale(element):
    """Every bf16 pattern up to twice the largest value, its fp32 neighbours (ties and around them), random numbers."""
    bf16 = EVERY_BF16[EVERY_BF16.abs() <= 2.0 ** (element.emax + 1)]
    up, down = (torch.nextafter(bf16, torch.tensor(x)) for x in (torch.inf, -torch.inf))
    return torch.cat((bf16, up, down, torch.randn(1 << 14), torch.randn(1 << 14) * element.max_normal))


def test_the_binade_of_every_significand():
    v = torch.arange(127 << 23, 128 << 23, dtype=torch.int32).view(torch.float32)
    for exponent in (-126, -20, 0, 1, 102):
        power = 2.0**exponent
        assert bool((inductor_cpu._binade(v * power) == power).all())


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounding_to_every_element(rounding):
    for name in ELEMENTS if rounding == "even" else pt2mx.FORMATS:
        element = ELEMENTS[name]
        v = values_of_a_scale(element)
        random = torch.randint(1 << 31, v.shape, dtype=torch.int32) if ROUNDINGS[rounding].random else None
        want = elements.round_to_element(v, element, rounding, random)
        assert same(inductor_cpu.round_to_element(v, element, rounding, random), want), name


def test_decoding_every_code():
    for element in ELEMENTS.values():
        codes = torch.arange(1 << element.bits, dtype=torch.int32)
        assert same(inductor_cpu.decode(codes, element), elements.decode(codes, element)), element.name


def blocks_of_every_kind():
    """(n, 32) fp32: blocks of every exponent, subnormal, ragged in exponents, with ties, zeros, NaN and Inf."""
    random = torch.randn(254, 32) * 2.0 ** torch.arange(-126, 128).unsqueeze(1)
    patterns = torch.randint(-(1 << 31), 1 << 31, (512, 32), dtype=torch.int64).to(torch.int32).view(torch.float32)
    ties = torch.arange(-512, 512).view(-1, 32) * 2.0 ** torch.randint(-149, 118, (32, 1))
    zeros = torch.tensor([[0.0, -0.0] * 16])
    return torch.cat((EVERY_BF16.view(-1, 32), random, random * 2.0**-23, patterns, ties, zeros))


@pytest.mark.diagonal
@pytest.mark.parametrize("scale_mode", SCALE_MODES)
@pytest.mark.parametrize("axis", [0, 1])
def test_quantization_of_every_kind_of_block(scale_mode, axis):
    x = blocks_of_every_kind()
    x = x if axis == 1 else x.T.contiguous()
    for name in (name for name in pt2mx.FORMATS if scale_mode in modes_of(name)):
        spec = MXSpec(name, 32, axis, scale_mode)
        assert same(reference.fake_quantize(x, spec, None, inductor_cpu), reference.fake_quantize(x, spec)), name


@pytest.mark.parametrize("shape", [(3, 70), (2, 40, 6, 6), (5,)])
def test_ragged_blocks(shape):
    x = torch.randn(shape)
    for axis in range(x.dim()):
        spec = MXSpec("fp6_e2m3", 32, axis)
        assert same(reference.fake_quantize(x, spec, None, inductor_cpu), reference.fake_quantize(x, spec))


def test_the_smallest_scale_without_subnormal_numbers():
    x = torch.randn(64, 32) * 2.0 ** torch.arange(-126, -62).unsqueeze(1)
    assert torch.set_flush_denormal(True)
    try:
        for name in pt2mx.FORMATS:
            spec = MXSpec(name, 32, 1)
            assert same(reference.fake_quantize(x, spec, None, inductor_cpu), reference.fake_quantize(x, spec)), name
    finally:
        torch.set_flush_denormal(False)


def code_of(function, *args):
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *args)
        torch.testing.assert_close(got, function(*args))
    return code


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("axis", [0, 1])
def test_values_are_not_looked_at_as_bits(axis):
    """A view of a vector of floats as integers goes through memory in Inductor's C++."""
    code = code_of(lambda x: pt2mx.fake_quantize_mx(x, "mxfp8", axis=axis), torch.randn(64, 64))
    *_, loop_over_values = code.split("for(int64_t x0")
    assert "copysign" in loop_over_values and "bit_cast" not in loop_over_values


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
def test_what_is_dear_is_computed_once():
    code = code_of(lambda x: pt2mx.fake_quantize_mx(torch.nn.functional.gelu(x), "mxfp8"), torch.randn(64, 64))
    assert code.count(".erf()") == 1


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
def test_between_convolutions_the_channels_stay_last():
    conv = torch.nn.Conv2d(64, 64, 3, padding=1)
    x = torch.randn(1, 64, 8, 8)
    plain = code_of(lambda x: conv(conv(x).relu()), x)
    torch._dynamo.reset()
    quantized = code_of(lambda x: conv(pt2mx.fake_quantize_mx(conv(x).relu(), "mxfp8", axis=1)), x)
    assert quantized.count("transpose_mxn<") == plain.count("transpose_mxn<")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("rows", "calls"), [(4, True), (256, False)])
@pytest.mark.compiled_cases("256-False")
def test_matmuls_of_many_rows_are_dense(rows, calls):
    scale, data = pt2mx.quantize_mx(torch.randn(96, 64), "mxfp4")

    def matmul(x):
        return torch.ops.pt2mx.linear_mx(x, data, scale, None, "fp4_e2m1", 32, 0)

    assert ("PreparedLinear" in code_of(matmul, torch.randn(rows, 64))) == calls
