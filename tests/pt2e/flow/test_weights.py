import warnings

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.flow.weights import nonfinite_operands, nonfinite_parameters
from tests.flow import calibrated, exported

NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.table = nn.Linear(64, 64), nn.Linear(64, 8), nn.Embedding(9, 64)
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    def forward(self, x):
        y = self.up(x + self.table.weight[:4])
        return self.down(torch.softmax(y @ y.t() + self.mask, -1) @ y)


def converted(change=None, x=None, qat=False, fold=True):
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 64) if x is None else x
    if change:
        change(model)
    prepare = pt2mx.prepare_qat_pt2e if qat else pt2mx.prepare_pt2e
    prepared = calibrated(exported(model, x), MXQuantizer.from_recipe("mxfp8"), x, prepare=prepare)
    return pt2mx.convert_pt2e(prepared, fold)


def spoil(name, value):
    return lambda model: model.get_parameter(name).data.view(-1)[70].fill_(value)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("change", "x", "names"),
    [
        (spoil("up.weight", NAN), None, ["up.weight", "an operand of matmul", "an operand of down"]),
        (spoil("down.weight", -INF), None, ["down.weight"]),
        (None, torch.full((4, 64), NAN), ["an operand of up", "an operand of matmul", "an operand of down"]),
        (None, torch.zeros(4, 64).index_fill(1, torch.tensor(3), INF), ["an operand of up"]),
    ],
)
@pytest.mark.parametrize("fold", [True, False])
def test_tensors_with_a_nan_are_named(change, x, names, fold):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = converted(change, x, fold=fold)
    assert set(names) <= set(nonfinite_operands(model))
    if change is None:  # convert warns about weights only: activations may be masked later
        assert not told
    else:
        assert str(told[0].message) == f"NaN or Inf in {names[0]}: blocks that hold such become NaN as a whole"
        assert told[0].filename == __file__


def test_a_weight_in_two_formats_is_named_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    spoil("0.weight", NAN)(model)
    chosen = MXQuantizer.from_recipe("mxfp4_weight_only").set_module_name("1", MXQuantizationConfig(weight="mxfp8"))
    prepared = calibrated(exported(model.eval(), torch.randn(4, 64)), chosen, torch.randn(4, 64))
    with pytest.warns(UserWarning, match="NaN or Inf in [01].weight: blocks"):
        pt2mx.convert_pt2e(prepared)


def test_a_weight_that_training_spoiled_is_named_without_statistics():
    with pytest.warns(UserWarning, match=r"NaN or Inf in down\.weight: blocks"):
        converted(spoil("down.weight", NAN), qat=True)


def test_masks_and_finite_models_are_no_matter():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = converted()
    assert nonfinite_operands(model) == [] and nonfinite_parameters(Net()) == []


def test_parameters():
    model = Net()
    spoil("up.weight", NAN)(model)
    spoil("table.weight", INF)(model)
    model.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False))
    assert nonfinite_parameters(model) == ["up.weight", "table.weight"]
