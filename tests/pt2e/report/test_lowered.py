import pytest
import torch
from torch import nn

from pt2mx import MXError, lower_to_inductor, quantization_report
from tests.flow import convert


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(nn.Linear(64, 8)), (torch.ones(2, 64),)),
        (nn.Sequential(nn.Embedding(8, 64)), (torch.arange(4),)),
    ],
    ids=["a product", "a gather"],
)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_weight_only"])
def test_packed_weights_are_refused(model, inputs, recipe):
    converted = convert(model, inputs, recipe)
    assert quantization_report(converted).weight_bits in (4.25, 8.25)
    with pytest.raises(MXError, match=r"reads a packed weight, as lower_to_inductor leaves it: report the converted"):
        quantization_report(lower_to_inductor(converted))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.0._flat_weights")  # export's
def test_operators_that_stay_are_reported_as_before():
    converted = convert(nn.Sequential(nn.LSTM(64, 32)), (torch.ones(3, 2, 64),), "mxfp8")
    before, after = quantization_report(converted), quantization_report(lower_to_inductor(converted))
    for total in ("bytes_before", "bytes_after", "values", "weight_bits"):
        assert getattr(after, total) == getattr(before, total), total
    specs = [[(o.role, o.spec) for o in report.operators[0].operands] for report in (before, after)]
    assert specs[0] == specs[1] and ("activation", "mxfp8_e4m3{32}") in specs[0]
    unpacked = quantization_report(lower_to_inductor(converted, unpack=True))
    assert unpacked.bytes_after == unpacked.bytes_before == before.bytes_before  # the weights are float again
