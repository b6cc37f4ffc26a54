import math

import pytest
import torch

from pt2mx import MXError, MXSpec, fake_quantize_mx
from pt2mx.statistics import QuantizationStatistics, quantization_sums, sqnr_db


def test_sums_of_a_known_tensor():
    x = torch.tensor([[7.0, 1.0, 0.1, -0.0], [3.0, 0.0, 0.0, 0.0]])  # fp4: 7 saturates at 6, 0.1 flushes
    spec = MXSpec("fp4_e2m1", 4)
    sums = quantization_sums(x, spec)
    error = x - fake_quantize_mx(x, spec)
    assert sums["values"] == 8 and sums["saturated"] == 1 and sums["flushed"] == 1
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


def test_summary():
    x = torch.ones(2, 32)
    x[1, 0] = math.nan
    summary = QuantizationStatistics.from_sums(quantization_sums(x, MXSpec("fp4_e2m1")))
    assert summary.nan_blocks == 1 and summary.exponents == {-2: 1} and math.isnan(summary.sqnr)
    exact = QuantizationStatistics.from_sums(quantization_sums(torch.ones(2, 32), MXSpec("fp4_e2m1")))
    assert exact.sqnr == math.inf and exact.saturated == exact.flushed == 0.0 and exact.values == 64


def test_no_value_no_statistics():
    assert QuantizationStatistics.from_sums(quantization_sums(torch.ones(0, 32), MXSpec("int8"))) is None


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
