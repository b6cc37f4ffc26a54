"""A fault in one layer of a real model: the first line of `compare_stages`, and the subgraph that `bisect` returns."""

import copy

import pytest
import torch
from torch import nn

import pt2mx
from tests.faults import scaled_weight, turned_scales
from tests.fresh_process import run_file


def converted(exported, recipe="mxfp8"):
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe(recipe)))


def check(exported, sound, broken, module, batch, path=None):
    """Check that both find the fault."""
    rows = pt2mx.compare_stages(exported, {"sound": sound, "broken": broken}, [batch]).rows
    assert (rows[0].stage, rows[0].module) == ("broken", module) and rows[0].isolated.sqnr < 12
    others = [row for row in rows[1:] if row.isolated.values]
    assert min(row.isolated.sqnr for row in others) > rows[0].isolated.sqnr + 6
    worst = pt2mx.bisect(sound, broken, batch, path=path)
    assert worst.modules == (module,) and worst.error > 0.25
    return worst


class Recurrent(nn.Module):
    """Two LSTMs and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.LSTM(64, 64, batch_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x):  # (B, S, 64) -> (B, 10)
        _, (hidden, _) = self.second(self.norm(self.first(x)[0]))
        return self.head(hidden[-1])


@pytest.mark.filterwarnings("ignore:The tensor attributes self.(first|second)._flat_weights")  # export's
def test_an_lstm(tmp_path):
    model, x = Recurrent().eval(), torch.randn(3, 12, 64)
    for weight in model.second.parameters():
        weight.data *= 4  # so that a gate moves
    exported = torch.export.export(model, (x,)).module()
    sound = converted(exported)
    worst = check(exported, sound, scaled_weight(sound, "second"), "second", x, tmp_path / "subgraph.py")
    assert worst.nodes[0].startswith("lstm")
    assert run_file(worst.path).splitlines()[-1] == f"relative error: {worst.error}"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["layer1.1.conv2", "layer3.0.downsample.0", "fc"])
def test_weights_of_a_resnet_with_folded_batch_norms(resnet18, module):
    exported, (x,) = resnet18.program.module(), resnet18.args
    sound = converted(exported)
    check(exported, sound, scaled_weight(sound, module), module, x[:1])


@pytest.mark.slow
def test_a_wrong_axis_in_a_resnet(resnet18):
    exported, (x,) = copy.deepcopy(resnet18.program.module()), resnet18.args
    exported.get_parameter("layer2.1.conv1.weight").data *= torch.exp2(torch.arange(128) % 7)[:, None, None, None]
    sound = converted(exported)
    check(exported, sound, turned_scales(sound, "layer2.1.conv1"), "layer2.1.conv1", x[:1])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [scaled_weight, turned_scales])
def test_minilm(minilm, fault, tmp_path):
    exported = minilm.program.module()
    sound = converted(exported)
    module = "bert.encoder.layer.3.attention.output.dense"
    worst = check(exported, sound, fault(sound, module), module, minilm.args, tmp_path / "subgraph.py")
    assert len(worst.nodes) == 1 and worst.nodes[0].startswith("linear")
    content = torch.load(tmp_path / "subgraph.pt", weights_only=False)
    (got,) = content["second"](*content["second_inputs"])
    (want,) = content["first"](*content["inputs"])
    assert (got - want).norm() / want.norm() == pytest.approx(worst.error, rel=1e-5)
