import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.sensitivity.result import Sensitivity, SensitivityRow
from pt2mx.pt2e.sensitivity.sensitivity import sensitivity


class Net(nn.Module):
    """Two heads that read one tensor, one of which counts ten times."""

    def __init__(self):
        super().__init__()
        self.up, self.strong, self.weak = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        x = F.gelu(self.up(x))
        return self.strong(x) + self.weak(x) / 10


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model, batches = Net().eval(), [torch.randn(64, 64) for _ in range(3)]
    shapes = ({0: torch.export.Dim("batch")},)
    return torch.export.export(model, (batches[0],), dynamic_shapes=shapes).module(), batches


def with_only(exported, names, spec="mxfp4"):
    """The model with some modules quantized, by the flow."""
    quantizer = pt2mx.MXQuantizer()
    for name in names:
        quantizer.set_module_name(name, pt2mx.get_default_mx_quantization_config(weight=spec, activation=spec))
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))


def test_numbers_are_those_of_models_quantized_in_part(net):
    exported, batches = net
    found = sensitivity(exported, batches, ["mxfp4"], metric="kl", left=True)
    rows = found.of("mxfp4")

    def divergence(names):
        model, totals = with_only(exported, names), []
        with torch.no_grad():
            for x in batches:
                got, want = (F.log_softmax(m(x).double(), -1) for m in (model, exported))
                totals.append((want.exp() * (want - got)).sum(-1).mean().item())
        return sum(totals) / len(totals)

    for name in ("up", "strong", "weak"):
        assert math.isclose(rows[name].alone, divergence([name]), rel_tol=1e-6)
        assert math.isclose(rows[name].left, divergence({"up", "strong", "weak"} - {name}), rel_tol=1e-6)
    assert math.isclose(found.whole["mxfp4"], divergence(["up", "strong", "weak"]), rel_tol=1e-6)
    assert list(rows)[-1] == "weak"  # one input, an observer of its own
    costs = [row.cost for row in found.rows]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("metric", ["kl", "cosine", "noise"])
def test_the_estimate_is_near_the_measurement(net, metric):
    exported, batches = net
    options = {"metric": metric, "operands": ["both", "weights", "activations"]}
    found = sensitivity(exported, batches, ["mxfp6", "mxfp8"], method="both", draws=4, **options)
    assert len(found.rows) == 3 * 2 * 3
    for row in found.rows:
        assert 0.6 < row.estimate / row.alone < 1.6, row
    assert found.agreement("mxfp6") == 1
    again = sensitivity(exported, batches, ["mxfp6", "mxfp8"], method="gradient", draws=4, **options)
    assert {row.estimate for row in again.rows} == {row.estimate for row in found.rows} and not again.whole


def test_the_model_stays_as_it_is(net):
    exported, batches = net
    before = exported(batches[0])
    sensitivity(exported, batches, "mxfp4", method="both", metric="noise")
    assert torch.equal(exported(batches[0]), before) and not any(p.grad is not None for p in exported.parameters())


def test_a_users_metric_and_configs(net):
    exported, batches = net
    largest = lambda got, want: (got - want).abs().max()  # noqa: E731
    config = pt2mx.get_default_mx_quantization_config(weight="mxfp4", activation=None)
    found = sensitivity(exported, batches, {"weights in FP4": config}, metric=largest)
    model = with_only(exported, [])
    assert found.of("weights in FP4")["up"].alone > 0 and model is not None
    weight_only = sensitivity(exported, batches, ["mxfp4"], metric=largest, operands=["weights"])
    for name, row in weight_only.of("mxfp4", "weights").items():
        assert row.alone == found.of("weights in FP4")[name].alone


def test_inputs_by_name_and_graphs_inside():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.one, self.two = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x, *, bias):
            return torch.cond(x.sum() > 0, self.one, self.two, (self.up(x) + bias,))

    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 64), "bias": torch.randn(64)}
    with torch.no_grad():
        exported = torch.export.export(Branches().eval(), (batch["x"],), {"bias": batch["bias"]}).module()
    found = sensitivity(exported, [batch, {**batch, "x": -batch["x"]}], ["mxfp4"], metric="noise", method="both")
    rows = found.of("mxfp4")
    assert rows["up"].estimate > 0 and rows["one"].alone > 0 and math.isnan(rows["one"].estimate)


def test_result(tmp_path):
    rows = [SensitivityRow(name, "mxfp4", "both", alone, math.nan, estimate) for name, alone, estimate in (
        ("a", 3.0, 2.0), ("b", 2.0, 3.0), ("c", 1.0, 0.5))]  # fmt: skip
    found = Sensitivity("kl", tuple(rows), {"mxfp4": 7.0})
    assert math.isclose(found.agreement("mxfp4"), 0.5, abs_tol=1e-6) and math.isnan(found.agreement("mxfp8"))
    assert json.loads(found.to_json(tmp_path / "s.json"))["rows"][0]["module"] == "a"
    assert json.loads((tmp_path / "s.json").read_text())["whole"] == {"mxfp4": 7.0}
    _, row, whole = found.to_table(1).splitlines()
    assert row.split() == ["a", "mxfp4", "both", "3", "2"] and whole == "mxfp4, everything: 7"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": nn.Linear(1, 1)}, "model must be a GraphModule, and is a module"),
        ({"metric": "kll"}, "metric='kll' is unknown: did you mean 'kl'"),
        ({"metric": 3}, "metric must be one of kl, cosine, noise, or a function, not int"),
        ({"metric": max, "method": "gradient"}, "method='gradient' needs one of kl, cosine, noise"),
        ({"method": "backward"}, "method='backward' is unknown"),
        ({"operands": "weights"}, "operands='weights' must be a list of both, weights, activations"),
        ({"operands": ["weight"]}, "must be a list of both, weights, activations"),
        ({"batches": []}, "there is no batch"),
        ({"batches": [(1, 2)]}, "the model takes x: give each of them once, not 2 values"),
        ({"candidates": []}, "there is no candidate"),
        ({"candidates": ["mxfp5"]}, "mxfp5"),
        ({"candidates": {"a": "mxfp4"}}, "the candidate 'a' must be an MXQuantizationConfig, not str"),
        ({"draws": 0}, "draws=0 must be an integer of at least 1"),
    ],
)
def test_errors(net, options, text):
    exported, batches = net
    given = {"model": exported, "batches": batches, "method": "gradient", **options}
    with pytest.raises(MXError, match=text):
        sensitivity(given.pop("model"), given.pop("batches"), **given)
