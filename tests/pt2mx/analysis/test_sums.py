import math

import pytest
import torch

from pt2mx import MXError, MXSpec, fake_quantize_mx, parse, tensor_scale_mx
from pt2mx.analysis.sums import QuantizationStatistics, quantization_noise, quantization_sums, sqnr_db
from tests.float_scale_operators import NAMES

FP4 = MXSpec("fp4_e2m1")


def test_sums_of_a_known_tensor():
    x = torch.tensor([[7.0, 1.0, 0.1, -0.0], [3.0, 0.0, 0.0, 0.0]])  # fp4: 7 saturates at 6, 0.1 flushes
    spec = MXSpec("fp4_e2m1", 4)
    sums = quantization_sums(x, spec)
    error = x - fake_quantize_mx(x, spec)
    assert sums["values"] == 8 and sums["saturated"] == 1 and sums["flushed"] == 1
    assert sums["tensors"] == 1 and sums["empty"] == 0 and sums["nonfinite"] == 0
    assert sums["signal"].item() == x.double().square().sum().item()
    assert sums["noise"].item() == error.double().square().sum().item()
    assert sums["exponents"].nonzero().flatten().tolist() == [126, 127]


@pytest.mark.parametrize("shape", [(3, 70), (70,), (2, 40, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_ragged_blocks_count_no_padding(shape, dtype):
    x = torch.randn(shape).to(dtype)
    sums = quantization_sums(x, MXSpec("fp4_e2m1", 32, -1))
    assert sums["values"] == x.numel()
    assert sums["exponents"].sum() == x.numel() // shape[-1] * -(-shape[-1] // 32)


def test_a_large_tensor_is_summed_in_slices():
    x = torch.randn(3000, 100)
    whole, halves = quantization_sums(x, FP4), [quantization_sums(part, FP4) for part in x.split(1500)]
    for name in ("values", "saturated", "flushed", "nonfinite", "exponents"):
        assert torch.equal(whole[name], halves[0][name] + halves[1][name])
    assert whole["tensors"] == 1 and whole["noise"].item() == pytest.approx(sum(h["noise"].item() for h in halves))


def test_values_that_are_not_finite_are_counted_and_their_blocks_left_out():
    x = torch.randn(3, 64)
    clean = x.clone()
    x[0, 3], x[0, 40], x[1, 0], x[1, 1] = math.nan, -math.inf, math.inf, math.inf
    rest = torch.cat([clean[1:2, 32:], clean[2:3, :32], clean[2:3, 32:]])  # the blocks that hold none of them
    got = QuantizationStatistics.from_sums(quantization_sums(x, FP4))
    want = QuantizationStatistics.from_sums(quantization_sums(rest, FP4))
    assert (got.nonfinite, got.nan_blocks, got.values) == (4, 3, 192)
    assert got.sqnr == pytest.approx(want.sqnr, rel=1e-12) and got.exponents == want.exponents
    assert got.saturated * 192 == want.saturated * 96 and got.flushed * 192 == want.flushed * 96


def test_sums_with_scales_of_a_significand():
    x = torch.tensor([[7.0, 1.0, 0.1, -0.0], [6.0, 0.0, 0.0, 0.0]])
    sums = quantization_sums(x, parse("nvfp4{4}"), torch.tensor(1.0))  # 7 / 6 is between the scales 1.125 and 1.25
    assert sums["saturated"] == 1 and sums["flushed"] == 1
    assert sums["noise"].item() == pytest.approx((7 - 6 * 1.125) ** 2 + 0.125**2 + 0.1**2)
    assert sums["exponents"].nonzero().flatten().tolist() == [127]


@pytest.mark.parametrize("name", NAMES)
def test_sqnr_of_scales_of_a_significand_by_hand(name):
    spec, x = parse(name), torch.randn(700, 600)  # of several slices
    t = tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
    y = fake_quantize_mx(x, spec, tensor_scale=t)
    statistics = QuantizationStatistics.of(quantization_sums(x, spec))
    assert statistics.sqnr == pytest.approx(
        sqnr_db(float(x.double().square().sum()), float((y.double() - x).square().sum()))
    )
    assert quantization_noise([x], spec).sqnr == pytest.approx(statistics.sqnr, rel=1e-5)
    assert sum(statistics.exponents.values()) == -(-700 // spec.block_rows) * -(-600 // spec.block_size)
    if name != "fp8_e4m3{16}(e4m3)":  # whose scales here are subnormal: values do not quantize to themselves
        exact = QuantizationStatistics.of(quantization_sums(y, spec, t))
        assert exact.sqnr == math.inf and exact.saturated == 0


def test_summary():
    nothing_finite = QuantizationStatistics.from_sums(quantization_sums(torch.full((2, 32), math.nan), FP4))
    assert math.isnan(nothing_finite.sqnr) and nothing_finite.nan_blocks == 2 and nothing_finite.exponents == {}
    exact = QuantizationStatistics.from_sums(quantization_sums(torch.ones(2, 32), FP4))
    assert exact.sqnr == math.inf and exact.saturated == exact.flushed == 0.0 and exact.values == 64
    assert exact.relative_noise == 0.0
    some = QuantizationStatistics.from_sums(sums := quantization_sums(torch.randn(2, 32), FP4))
    assert some.relative_noise == pytest.approx(float(sums["noise"] / sums["signal"]))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,), (2, 0, 3)])
def test_tensors_without_values_are_counted(shape):
    empty = quantization_sums(torch.ones(shape), MXSpec("int8"))
    got = QuantizationStatistics.from_sums(empty)
    assert (got.tensors, got.empty, got.values, got.saturated, got.exponents) == (1, 1, 0, 0.0, {})
    assert math.isnan(got.sqnr)
    full = quantization_sums(torch.randn(2, 32), MXSpec("int8"))
    both = QuantizationStatistics.from_sums({name: empty[name] + full[name] for name in full})
    assert (both.tensors, both.empty, both.values) == (2, 1, 64) and both.sqnr > 30


def test_no_tensor_no_statistics():
    sums = {name: torch.zeros_like(value) for name, value in quantization_sums(torch.ones(2), FP4).items()}
    assert QuantizationStatistics.from_sums(sums) is None


def test_the_lowest_code_of_a_full_range_integer_is_no_saturation():
    x = torch.tensor([-1.995, 1.995])
    assert quantization_sums(x, MXSpec("int8_full", 2))["saturated"] == 1
    assert quantization_sums(x, MXSpec("int8", 2))["saturated"] == 2


def test_scales_beyond_e8m0_have_no_statistics():
    with pytest.raises(MXError, match="scale_exp_bits must be at most 8"):
        quantization_sums(torch.ones(32), MXSpec("fp4_e2m1", scale_exp_bits=9))


@pytest.mark.parametrize(("signal", "noise", "db"), [(100.0, 1.0, 20.0), (1.0, 0.0, math.inf), (0.0, 0.0, math.inf)])
def test_sqnr(signal, noise, db):
    assert sqnr_db(signal, noise) == db


@pytest.mark.diagonal
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 1e36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3000, 100), (70,), (2, 40, 5)])
def test_the_noise_alone_is_that_of_the_sums(shape, dtype, size):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    for spec in (FP4, MXSpec("int8", 32, 0)):
        found, want = quantization_noise([x], spec), QuantizationStatistics.from_sums(quantization_sums(x, spec))
        assert found.sqnr == pytest.approx(want.sqnr, abs=1e-3) and found.values == want.values
        assert math.isnan(found.saturated) and math.isnan(found.flushed) and found.exponents == {}


def test_the_noise_of_several_tensors_without_values_among_them():
    parts = [torch.randn(2, 32), torch.ones(0, 32), torch.randn(4, 32)]
    found, whole = quantization_noise(parts, FP4), quantization_noise([torch.cat(parts)], FP4)
    assert (found.tensors, found.empty, found.values) == (3, 1, 192) and found.sqnr == pytest.approx(whole.sqnr)
    assert math.isnan(quantization_noise([torch.ones(0, 32)], FP4).sqnr)
    assert quantization_noise([torch.ones(2, 32)], FP4).sqnr == math.inf


def test_the_noise_leaves_out_blocks_that_are_not_finite():
    x = torch.randn(3, 64)
    x[0, 3] = math.nan
    want = QuantizationStatistics.from_sums(quantization_sums(x, FP4))
    assert quantization_noise([x], FP4) == want and want.nan_blocks == want.nonfinite == 1
