import pytest
import torch

import pt2mx
from pt2mx import fake_quantize_mx, parse
from pt2mx.algorithms import gptq
from pt2mx.algorithms.block_scales import choose_scales, nearest_scales
from tests.float_scale_operators import NAMES

SPECS = [s for name in NAMES if not (s := parse(name)).scale_format.is_power_of_two and s.block_rows == 1]


def weights():
    torch.manual_seed(0)
    return torch.randn(48, 70) * torch.randn(48, 1).exp()


def error(a, b):
    return float((a.double() - b.double()).square().sum())


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_by_chosen_scales_are_the_rounded_values(spec, axis):
    w, spec = weights(), spec.replace(axis=axis)
    scales = choose_scales(w, spec)
    rounded = scales.round(w)
    t = scales.tensor_scale
    got = pt2mx.dequantize_mx(scales.codes(rounded), scales.stored, spec, length=w.shape[axis], tensor_scale=t)
    assert torch.equal(got, rounded) and torch.equal(scales.round(rounded), rounded)
    assert error(rounded, w) < 0.98 * error(fake_quantize_mx(w, spec), w)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_nearest_scales_are_those_of_the_operator(spec):
    w = weights()
    scales = nearest_scales(w, spec)
    scale, data = pt2mx.quantize_mx(w, spec, tensor_scale=scales.tensor_scale)
    assert torch.equal(scales.stored, scale) and torch.equal(scales.codes(w), data)
    assert torch.equal(scales.round(w), fake_quantize_mx(w, spec))


def test_the_search_beats_each_scale_mode():
    w, spec = weights(), parse("nvfp4")
    modes = {
        mode: error(fake_quantize_mx(w, spec.replace(scale_mode=mode)), w) for mode in ("nearest", "four_six", "mse")
    }
    assert error(choose_scales(w, spec).round(w), w) < 0.95 * min(modes.values())


def test_important_columns_are_closer():
    w, spec, importance = weights(), parse("nvfp4"), torch.ones(48, 70)
    importance[:, ::5] = 100
    plain, weighted = choose_scales(w, spec).round(w), choose_scales(w, spec, importance).round(w)
    assert error(weighted[:, ::5], w[:, ::5]) < 0.95 * error(plain[:, ::5], w[:, ::5])


def test_gptq_with_given_scales():
    w, spec = weights(), parse("nvfp4", axis=1)
    x = torch.randn(400, 70) @ torch.randn(70, 70)
    x[:, 3] = 0  # rounded to nearest
    scales = choose_scales(w, spec)
    rounded = gptq(w, x.T @ x, spec, scales=scales.of_values(70))
    nearest = scales.round(w)
    assert torch.equal(scales.round(rounded), rounded) and torch.equal(rounded[:, 3], nearest[:, 3])
    assert error(x @ rounded.T, x @ w.T) < 0.7 * error(x @ nearest.T, x @ w.T)
