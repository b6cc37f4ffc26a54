"""Nested rounding: all values within the bounds quantize to the narrow value, and the neighbours outside do not."""

import pytest
import torch

import pt2mx
from pt2mx import MXSpec
from pt2mx.algorithms import cell_bounds, gptq, keep_slices

ANCHORS = ("mxint8", "mxfp8", "int7{32}")
NARROW = ("mxfp4", "mxfp6", "int4{32}", "int6{32}")


def weights(shape=(40, 70), seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def specs(narrow, anchor, axis=-1):
    return pt2mx.parse(narrow).replace(axis=axis % 2, scale_mode="even"), pt2mx.parse(anchor).replace(axis=axis % 2)


@pytest.mark.diagonal
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("anchor", ANCHORS)
def test_bounds_are_those_of_the_definition(narrow, anchor):
    """Every value of the anchor is tried for each weight, next to the largest of the block, which keeps the scales."""
    spec, wide = specs(narrow, anchor)
    weight = weights((1, 32))
    weight[0, 0] = 6.0  # on the grids of all formats
    rounded = pt2mx.fake_quantize_mx(weight, spec)
    low, high = cell_bounds(rounded, spec, weight, wide)
    values = torch.linspace(-8, 8, 2**14 + 1)
    rows = rounded.repeat(len(values), 1)
    for i in range(1, 32):
        tried = rows.clone()
        tried[:, i] = values
        tried = tried[pt2mx.fake_quantize_mx(tried, wide)[:, i] == values]
        tried = tried[tried[:, i].abs() < 6]
        same = tried[(pt2mx.fake_quantize_mx(tried, spec) == rounded)[:, i], i]
        within = tried[(low[0, i] <= tried[:, i]) & (tried[:, i] <= high[0, i]), i]
        assert set(within.tolist()) <= set(same.tolist())
        # ties at both ends round to the value where its code is even
        outside = same[(same < low[0, i]) | (same > high[0, i])]
        assert len(outside) <= 2 and (len(within) or low[0, i] == high[0, i] == rounded[0, i])


def test_the_next_values_of_the_anchor_round_to_others():
    """By hand: INT3 with the scale 1 has the values k / 2, and INT8 k / 64; ties go to the even k."""
    weight = torch.tensor([[1.4, 0.6, -0.1, 0.0]])
    rounded = pt2mx.fake_quantize_mx(weight, "int3{32}")
    assert rounded.tolist() == [[1.5, 0.5, -0.0, 0.0]]
    low, high = cell_bounds(rounded, pt2mx.parse("int3{32}", axis=1), weight, pt2mx.parse("int8{32}", axis=1))
    assert (low * 64).tolist() == [[81, 17, -15, -15]]  # 80 and 16 are ties
    assert (high * 64).tolist() == [[127, 47, 15, 15]]


def test_where_the_anchor_has_no_value_the_bounds_are_the_rounded_value():
    """FP6 E3M2 has values near zero between those of INT8."""
    spec, wide = specs("mxfp6_e3m2", "mxint8")
    weight = weights()
    rounded = pt2mx.fake_quantize_mx(weight, spec)
    low, high = cell_bounds(rounded, spec, weight, wide)
    alone = pt2mx.fake_quantize_mx(rounded, wide) != rounded
    assert torch.equal(low[alone & (low == high)], rounded[alone & (low == high)])


@pytest.mark.parametrize(
    ("anchor", "narrow"),
    [("mxint8", "mxfp4"), ("mxint8", "mxfp6"), ("mxint8", "int6{32}"), ("mxfp8", "mxfp4"), ("mxfp8", "int4{32}")],
)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_slices_quantize_to_the_rounded_values(narrow, anchor, axis, dtype):
    spec, wide = specs(narrow, anchor, axis)
    weight = weights().to(dtype)
    # values that other roundings would give: some are a code away from the nearest
    rounded = pt2mx.fake_quantize_mx(weight + 0.1 * weights(seed=1).to(dtype), spec)
    values = weight.float().clamp(*cell_bounds(rounded, spec, weight, wide)).to(dtype)
    kept = keep_slices(values, rounded, spec, wide)
    assert kept.dtype == dtype
    assert torch.equal(pt2mx.fake_quantize_mx(kept, wide), kept)
    assert torch.equal(pt2mx.fake_quantize_mx(kept, spec), rounded)
    assert (kept - weight).float().square().sum() < 0.9 * (rounded - weight).float().square().sum()
    nearest = pt2mx.fake_quantize_mx(weight, wide)
    assert torch.equal(keep_slices(nearest, pt2mx.fake_quantize_mx(nearest, spec), spec, wide), nearest)


def test_gptq_within_bounds():
    weight, x = weights((24, 64)), weights((500, 64), 1) @ weights((64, 64), 2)
    x[:, 5] = 0  # a column without input
    spec, wide = MXSpec("mxfp4", 32, 1, "even"), MXSpec("mxint8", 32, 1)
    rounded = gptq(weight, x.T @ x, spec)
    bounds = cell_bounds(rounded, spec, weight, wide)
    values = gptq(weight, x.T @ x, wide, bounds=bounds)
    assert ((bounds[0] <= values) & (values <= bounds[1])).all()

    def error(quantized):
        return (x @ (weight - quantized).T).square().sum()

    kept = keep_slices(values, rounded, spec, wide)
    clamped = keep_slices(weight.clamp(*bounds), rounded, spec, wide)
    assert error(kept) < error(clamped) < error(rounded)
    assert torch.equal(pt2mx.fake_quantize_mx(kept, spec), rounded)
    everything = torch.full_like(weight, -9.0), torch.full_like(weight, 9.0)
    assert torch.equal(gptq(weight, x.T @ x, spec, bounds=everything), rounded)
