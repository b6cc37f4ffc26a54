"""Arithmetic without bit casts gives the bits of the reference."""

import operator

import pytest
import torch

from pt2mx import ELEMENTS, MXSpec, parse, parse_scale_format
from pt2mx.kernels import arithmetic, elements, reference
from pt2mx.kernels.packing import unpack
from pt2mx.modes import ROUNDINGS, SCALE_MODES, scale_modes

E8M0 = parse_scale_format("e8m0")
NON_FINITE = [float("inf"), float("-inf"), float("nan")]


def bits_near_every_power():
    """fp32 bit patterns: each exponent, with mantissas at both ends and in the middle, of both signs."""
    mantissas = torch.tensor([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF, 0x155555], dtype=torch.int32)
    exponents = torch.arange(255, dtype=torch.int32) << 23
    magnitudes = (exponents.unsqueeze(1) | mantissas).flatten()
    return torch.cat([magnitudes, magnitudes | -0x80000000])


def assert_same_bits(a, b):
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(7.0), b.nan_to_num(7.0)
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_casts_in_both_directions():
    bits = bits_near_every_power()
    x = bits.view(torch.float32)
    assert torch.equal(arithmetic.view_dtype(x, torch.int32), bits)
    assert_same_bits(arithmetic.view_dtype(bits, torch.float32), x)
    x = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(arithmetic.view_dtype(x, torch.int32)[:2], x[:2].view(torch.int32))
    assert_same_bits(arithmetic.view_dtype(x.view(torch.int32), torch.float32), x)


def test_powers_of_two_do_not_depend_on_the_accuracy_of_pow(monkeypatch):
    exponents = torch.arange(-64, 65, dtype=torch.int32)
    exact = torch.ldexp(torch.ones(129), exponents)
    for error in (-4, 0, 4):  # in units of the last place
        monkeypatch.setattr(
            torch, "pow", lambda base, e, error=error: torch.ldexp(torch.full((129,), 1 + error * 2.0**-23), e)
        )
        assert torch.equal(arithmetic._power(exponents), exact)


def test_no_compiler_merges_or_fuses_the_products_of_a_power():
    """XLA 0.10.2 gave 0.625 times the powers of a table: it fused a product and a difference, across an abs."""
    graph = torch.fx.symbolic_trace(arithmetic.power_below, concrete_args={"factor": 1.0}).graph
    products = graph.find_nodes(op="call_function", target=operator.mul)
    assert [user.target for node in products for user in node.users] == ["abs", torch.minimum]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "fp8_e7m0"])
def test_each_rounding_and_each_code(name):
    element, random = ELEMENTS[name], torch.randint(1 << 31, (4590,), dtype=torch.int32)
    values = bits_near_every_power().view(torch.float32)
    for rounding in ROUNDINGS:
        mine = arithmetic.round_to_element(values, element, rounding, random)
        assert_same_bits(mine, elements.round_to_element(values, element, rounding, random))
    codes = torch.arange(1 << element.bits, dtype=torch.int32)
    decoded = arithmetic.decode(codes, element)
    assert_same_bits(decoded, elements.decode(codes, element))
    every = torch.arange(256, dtype=torch.int32).unsqueeze(1)
    assert_same_bits(arithmetic.times_scales(decoded, every), elements.times_scales(decoded, every))


@pytest.mark.parametrize("mode", [mode for mode in SCALE_MODES if not SCALE_MODES[mode].searches])
def test_fake_quantization_of_every_scale(mode):
    torch.manual_seed(0)
    bits = bits_near_every_power()
    largest = bits.view(torch.float32)[: len(bits) // 2]
    x = torch.cat([largest.unsqueeze(1), largest.unsqueeze(1) * (torch.rand(len(largest), 36) * 2 - 1)], 1)
    x[::7, 5], x[3, 2], x[4, 34], x[5, 0] = -0.0, *NON_FINITE
    for name in ELEMENTS:
        if mode not in scale_modes(E8M0, ELEMENTS[name]) or ELEMENTS[name].bits not in (4, 6, 8):
            continue
        spec = MXSpec(name, axis=1, scale_mode=mode)
        assert arithmetic._is_direct(spec)
        assert_same_bits(arithmetic.fake_quantize(x, spec), reference.fake_quantize(x, spec))


def test_zero_blocks_stay_zero_where_subnormals_are_flushed():
    x = torch.zeros(2, 64)
    x[1, 32:] = 1.0
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(arithmetic.fake_quantize(x, MXSpec("mxfp8", axis=1)), x)
    finally:
        torch.set_flush_denormal(False)


def test_what_is_left_to_the_casts():
    assert not arithmetic._is_direct(MXSpec("mxfp8", scale_mode="mse"))
    assert not arithmetic._is_direct(MXSpec("mxfp8", rounding="up"))


def test_casts_of_bfloat16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    assert_same_bits(arithmetic.view_dtype(bits, torch.bfloat16).float(), x.float())
    assert torch.equal(arithmetic.view_dtype(x, torch.int16)[~x.isnan()], bits[~x.isnan()])


@pytest.mark.parametrize("text", ["mxfp8", "mxfp4(rceil,half_away)", "mxint8(mse)", "mxfp6_e3m2(floor,up)", "nvfp4"])
def test_values_and_scales_of_codes(text):
    x = bits_near_every_power().view(torch.float32)[:4576].reshape(26, 176)
    x[3, 5], x[4, 40], x[5] = float("nan"), float("inf"), 0.0
    spec = parse(text, axis=1)
    t = torch.tensor(0.25) if spec.has_tensor_scale else None
    values, scale = arithmetic.quantize(x, spec, arithmetic, t)
    stored, data = reference.quantize(x, spec, None, elements, t)
    codes = unpack(data, 1, spec.element.bits)[:, :176]
    finite = reference.of_each_value(~spec.scale_format.is_nan(stored), 1, spec.block_size, 176)
    assert_same_bits(values[finite], elements.decode(codes, spec.element)[finite])
    assert not values[~finite].any()
    dtype = torch.float8_e8m0fnu if spec.has_power_of_two_scale else torch.float8_e4m3fn
    assert_same_bits(scale, stored.view(dtype).float())
