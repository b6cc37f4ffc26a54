"""The results of each mode, written by hand; test_reference compares all combinations with the oracle."""

import math
import re

import pytest
import torch

from pt2mx import MXError, MXSpec, create_mx_spec, dequantize_mx, fake_quantize_mx, parse, quantize_mx
from pt2mx.modes import ROUNDINGS, SCALE_MODES, ScaleMode
from tests.cpu_kernels import check_cpu
from tests.random_values import random_values

# int4 in a block whose largest value is 1.75: multiples of 0.25, so that the units are 4x
TIES = [1.75, 0.125, 0.375, -0.125, -0.375, 0.2, -0.2, 0.0]


@pytest.mark.parametrize(
    ("rounding", "quanta"),
    [
        ("even", [7, 0, 2, 0, -2, 1, -1, 0]),
        ("half_away", [7, 1, 2, -1, -2, 1, -1, 0]),
        ("half_toward_zero", [7, 0, 1, 0, -1, 1, -1, 0]),
        ("half_up", [7, 1, 2, 0, -1, 1, -1, 0]),
        ("toward_zero", [7, 0, 1, 0, -1, 0, 0, 0]),
        ("up", [7, 1, 2, 0, -1, 1, 0, 0]),
        ("down", [7, 0, 1, -1, -2, 0, -1, 0]),
    ],
)
def test_roundings(rounding, quanta):
    got = fake_quantize_mx(torch.tensor(TIES), "int4", 8, rounding=rounding)
    assert got.tolist() == [q / 4 for q in quanta]


@pytest.mark.parametrize("rounding", [name for name, rounding in ROUNDINGS.items() if not rounding.random])
def test_just_below_a_half(rounding):
    """floor(x + 0.5) would round 0.49999997 of a step up."""
    x = torch.tensor([4.0, 0.5 * 0.49999997, -0.5 * 0.49999997])  # FP4: a step of 0.5 below 2
    got = fake_quantize_mx(x, "fp4_e2m1", 3, rounding=rounding).tolist()
    assert got == {"up": [4.0, 0.5, 0.0], "down": [4.0, 0.0, -0.5]}.get(rounding, [4.0, 0.0, 0.0])
    assert math.copysign(1, got[2]) == -1


@pytest.mark.parametrize("tiny", [1e-45, 1e-38, 1e-20])
def test_directed_roundings_see_the_smallest_values(tiny):
    x = torch.tensor([2.0**127, tiny, -tiny, 0.0])
    step = 2.0**125 * 0.5
    assert fake_quantize_mx(x, "fp4_e2m1", 4, rounding="up").tolist()[1:] == [step, 0.0, 0.0]
    assert fake_quantize_mx(x, "fp4_e2m1", 4, rounding="down").tolist()[1:] == [0.0, -step, 0.0]


@pytest.mark.parametrize(
    ("amax", "exponents"),  # FP4: emax 2, max 6 = 1.5 * 4
    [
        (3.9999998, {"floor": -1, "ceil": 0, "rceil": 0, "rceil_v2": 0, "even": 0, "doubled": 0}),
        (4.0, {"floor": 0, "ceil": 0, "rceil": 0, "rceil_v2": 0, "even": 0, "doubled": 1}),
        (4.0000005, {"floor": 0, "ceil": 1, "rceil": 0, "rceil_v2": 0, "even": 0}),
        (6.0, {"floor": 0, "ceil": 1, "rceil": 0, "rceil_v2": 0, "even": 0}),
        (6.0000005, {"floor": 0, "ceil": 1, "rceil": 1, "rceil_v2": 0, "even": 0}),
        (6.9999995, {"floor": 0, "ceil": 1, "rceil": 1, "rceil_v2": 0, "even": 0}),
        (7.0, {"floor": 0, "ceil": 1, "rceil": 1, "rceil_v2": 0, "even": 1}),
        (7.25, {"floor": 0, "ceil": 1, "rceil": 1, "rceil_v2": 0, "even": 1}),
        (7.2500005, {"floor": 0, "ceil": 1, "rceil": 1, "rceil_v2": 1, "even": 1}),
        (7.9999995, {"floor": 0, "ceil": 1, "rceil": 1, "rceil_v2": 1, "even": 1, "doubled": 1}),
    ],
)
def test_scale_modes(amax, exponents):
    for mode, exponent in exponents.items():
        scale, _ = quantize_mx(torch.tensor([amax]), "fp4_e2m1", 1, scale_mode=mode)
        assert scale.item() - 127 == exponent, mode


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp6_e2m3", "fp4_e1m2", "int4"])
def test_a_mode_of_fp4_alone_is_refused_for_other_elements(name):
    message = (
        f"scale_mode 'rceil_v2' is not defined for {name}: use one of floor, ceil, rceil, even, doubled, mse for it"
    )
    with pytest.raises(MXError, match=re.escape(message)):
        MXSpec(name, scale_mode="rceil_v2")
    with pytest.raises(MXError, match=re.escape(f"in '{name}(rceil_v2)': {message}")):
        parse(f"{name}(rceil_v2)")
    with pytest.raises(MXError, match=re.escape(message)):
        fake_quantize_mx(torch.ones(32), name, scale_mode="rceil_v2")


def test_mse_takes_the_exponent_that_loses_least():
    """All values near the top saturate under floor; all small ones want a finer grid."""
    exponent = lambda values: quantize_mx(torch.tensor(values), "fp4_e2m1", 4, scale_mode="mse")[0].item() - 127  # noqa: E731
    assert exponent([7.9, 7.9, 7.9, 7.9]) == 1
    assert exponent([4.0, 0.25, 0.25, 0.25]) == 0 and exponent([5.9, 5.9, 3.1, 6.0]) == 0
    assert exponent([4.0, 0.25, 0.25, 0.26]) == 0
    assert exponent([3.0, 1.5, 0.75, 0.375]) == -1 and exponent([3.0, 1.5, 1.0, 0.5]) == -1
    assert exponent([4.0, 2.0, 1.0, 0.0]) == 0  # exact under each: the smallest change


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "int4"])
def test_mse_never_loses_more_than_floor(name):
    x = torch.randn(500, 32) * torch.rand(500, 1).exp()
    error = {m: (fake_quantize_mx(x, name, scale_mode=m) - x).double().square().sum(1) for m in ("floor", "mse")}
    assert (error["mse"] <= error["floor"] * (1 + 1e-6)).all() and error["mse"].sum() < 0.99 * error["floor"].sum()


@pytest.mark.parametrize("exponent_offsets", [(-1, 0, 2, -3, 1), (1,), (2, 0), (0, -1, 1)])
def test_kernels_follow_the_table_of_neighbours(monkeypatch, exponent_offsets):
    """In any order and number; a single one is taken."""
    name = f"one of {exponent_offsets}"
    monkeypatch.setitem(SCALE_MODES, name, ScaleMode(SCALE_MODES["floor"].threshold, exponent_offsets))
    for i, element in enumerate(("fp4_e2m1", "fp6_e3m2", "int8")):
        for block, axis in ((32, 1), (5, 0)):
            x = torch.cat([random_values((20, 70), torch.float32, kind) for kind in range(5)])
            check_cpu(x, MXSpec(element, block, axis, name, ("even", "stochastic", "up")[i]))
    x = torch.randn(200, 64)
    changes = quantize_mx(x, "fp4_e2m1", scale_mode=name)[0].int() - quantize_mx(x, "fp4_e2m1")[0].int()
    assert set(changes.unique().tolist()) <= set(exponent_offsets)
    assert len(exponent_offsets) > 1 or (changes == exponent_offsets[0]).all()


@pytest.mark.compiled
def test_compiled_code_follows_the_table_of_neighbours(monkeypatch, compiler):
    monkeypatch.setitem(SCALE_MODES, "other", ScaleMode(SCALE_MODES["floor"].threshold, (1, 0)))
    x = torch.randn(20, 64)
    compiled = torch.compile(lambda x: fake_quantize_mx(x, "fp4_e2m1", scale_mode="other"), fullgraph=True)
    assert torch.equal(compiled(x), fake_quantize_mx(x, "fp4_e2m1", scale_mode="other"))


def test_stochastic_rounding_is_unbiased():
    """Over a million draws the mean of each value is the value, to within five standard errors."""
    values = torch.linspace(-1.7, 1.7, 31)
    x = torch.cat([values, torch.tensor([1.75])]).repeat(1_000_000 // 31 + 1, 1)
    y = fake_quantize_mx(x, "int4", rounding="stochastic", seed=1)[:, :31]
    low = (values * 4).floor() / 4
    probability = (values - low) * 4
    standard_error = 0.25 * (probability * (1 - probability) / len(x)).sqrt()
    assert y.numel() >= 1_000_000
    assert ((y.double().mean(0) - values).abs() <= 5 * standard_error + 1e-6).all()
    assert torch.equal(torch.minimum(y, low + 0.25), y) and torch.equal(torch.maximum(y, low), y)


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp8_e5m2", "int8"])
def test_seeds(name):
    x = torch.randn(8, 64)

    def draw(seed=None):
        return fake_quantize_mx(x, name, rounding="stochastic", seed=seed)

    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))
    assert not torch.equal(draw(), draw())
    torch.manual_seed(5)
    first = draw()
    torch.manual_seed(5)
    assert torch.equal(draw(), first)
    generator = torch.Generator().manual_seed(6)
    second = draw(generator)
    assert not torch.equal(draw(generator), second)
    assert torch.equal(draw(generator.manual_seed(6)), second)
    scale, data = quantize_mx(x, name, rounding="stochastic", seed=3)
    assert torch.equal(dequantize_mx(data, scale, name), draw(3))


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "3", True])
def test_other_seeds_are_refused(seed):
    with pytest.raises(MXError, match="seed="):
        fake_quantize_mx(torch.ones(32), "mxfp4", rounding="stochastic", seed=seed)


def test_a_seed_changes_no_other_rounding():
    x = torch.randn(64)
    assert torch.equal(fake_quantize_mx(x, "mxfp4", seed=1), fake_quantize_mx(x, "mxfp4"))


@pytest.mark.compiled  # test_inductor.py compiles every rounding
def test_stochastic_rounding_compiles(compiler):
    x = torch.randn(8, 64)
    seeded = torch.compile(lambda x, s: fake_quantize_mx(x, "mxfp4", rounding="stochastic", seed=s), fullgraph=True)
    for seed in (1, 2, 2**62 + 5):
        assert torch.equal(seeded(x, seed), fake_quantize_mx(x, "mxfp4", rounding="stochastic", seed=seed))
    unseeded = torch.compile(lambda x: fake_quantize_mx(x, "mxfp4", rounding="stochastic"), fullgraph=True)
    assert not torch.equal(unseeded(x), unseeded(x))


@pytest.mark.parametrize("scale_mode", ["floor", "mse", "rceil"])
@pytest.mark.parametrize("name", ["fp4_e2m1", "int4_full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipped_gradient_is_zero_where_the_value_saturates(name, dtype, scale_mode):
    x = torch.randn(64, 40).to(dtype).requires_grad_()
    weight = torch.randn(64, 40).to(dtype)
    (fake_quantize_mx(x, name, scale_mode=scale_mode, ste="clipped") * weight).sum().backward()
    spec = MXSpec(name, scale_mode=scale_mode)
    scale, _ = quantize_mx(x, spec)
    limit = 2.0 ** (scale.float() - 127).repeat_interleave(32, 1)[:, :40]
    beyond = (x > spec.element.max_normal * limit) | (x < spec.element.lowest * limit)
    assert torch.equal(x.grad, weight.masked_fill(beyond, 0))
    assert bool(beyond.any()) == (scale_mode != "rceil")


@pytest.mark.compiled
def test_clipped_gradient_compiled_and_of_odd_shapes(compiler):
    for shape in [(), (2, 40, 5)]:
        x = torch.randn(shape, requires_grad=True)
        fake_quantize_mx(x * 3, "mxfp4", ste="clipped").sum().backward()
        eager, x.grad = x.grad, None
        run = torch.compile(lambda x: fake_quantize_mx(x * 3, "mxfp4", ste="clipped").sum(), fullgraph=True)
        run(x).backward()
        assert torch.equal(x.grad, eager)


def test_unknown_ste():
    with pytest.raises(MXError, match="unknown ste 'clip': did you mean 'clipped'"):
        fake_quantize_mx(torch.ones(32), "mxfp4", ste="clip")


def test_other_scales_are_emulated_with_gradient():
    spec = create_mx_spec(2, 1, scale_exp_bits=4)
    x = torch.tensor([1e-30, 1e30, 5.0], requires_grad=True)
    y = fake_quantize_mx(x, spec)
    y.sum().backward()
    assert y.tolist() == [0.0, 6 * 2.0**7, 0.0] and x.grad.tolist() == [1.0] * 3
    x.grad = None
    fake_quantize_mx(x, spec, ste="clipped").sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 1.0]
    assert fake_quantize_mx(torch.tensor(5.0), spec).item() == 4.0
    with pytest.raises(MXError, match="take E8M0 scales"):
        quantize_mx(x, spec)


def test_a_significand_of_the_scale_is_counted_and_changes_no_value():
    """As in pychop, whose scales are powers of two."""
    x = torch.randn(64)
    spec = create_mx_spec(4, 3, 16, scale_sig_bits=3)
    assert torch.equal(fake_quantize_mx(x, spec), fake_quantize_mx(x, "mxfp8{16}"))
    assert spec.effective_bits == 8 + 11 / 16
