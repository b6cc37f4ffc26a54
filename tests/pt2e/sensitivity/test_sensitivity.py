import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2mx
from pt2mx import MXError, sensitivity
from tests.models import module_of
from tests.subgraph_models import X


class Net(nn.Module):
    """Two heads on one tensor; the output weights one of them ten times."""

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
    """Return the model with some modules quantized by the normal flow."""
    quantizer = pt2mx.MXQuantizer()
    for name in names:
        quantizer.set_module_name(name, pt2mx.get_default_mx_quantization_config(weight=spec, activation=spec))
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))


def test_numbers_are_those_of_models_quantized_in_part(net):
    exported, batches = net
    actual = sensitivity(exported, batches, ["mxfp4"], metric="kl", left=True)
    rows = actual.of("mxfp4")

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
    assert math.isclose(actual.whole["mxfp4"], divergence(["up", "strong", "weak"]), rel_tol=1e-6)
    assert list(rows)[-1] == "weak"  # it shares the input, but has its own observer
    costs = [row.cost for row in actual.rows]
    assert costs == sorted(costs, reverse=True)


def test_static_tensor_scales_follow_from_the_batches(net):
    exported, batches = net
    config, mxfp4 = (pt2mx.MXQuantizationConfig(name, name) for name in ("nvfp4", "mxfp4"))
    actual = sensitivity(exported, batches, {"nvfp4": config, "mxfp4": mxfp4}, metric="kl", method="both")
    prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config))
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
        converted = pt2mx.convert_pt2e(prepared)
        pairs = [[F.log_softmax(m(x).double(), -1) for m in (converted, exported)] for x in batches]
    divergences = [(want.exp() * (want - got)).sum(-1).mean().item() for got, want in pairs]
    assert math.isclose(actual.whole["nvfp4"], sum(divergences) / len(divergences), rel_tol=1e-6)
    assert actual.whole["nvfp4"] < actual.whole["mxfp4"]
    rows = actual.of("nvfp4")
    assert all(0.1 < row.estimate / row.alone < 10 for row in rows.values())


@pytest.mark.parametrize("metric", ["kl", "cosine", "noise"])
def test_the_estimate_is_near_the_measurement(net, metric):
    exported, batches = net
    options = {"metric": metric, "operands": ["both", "weights", "activations"]}
    actual = sensitivity(exported, batches, ["mxfp6", "mxfp8"], method="both", draws=4, **options)
    assert len(actual.rows) == 3 * 2 * 3
    for row in actual.rows:
        assert 0.6 < row.estimate / row.alone < 1.6, row
    assert actual.agreement("mxfp6") == 1
    again = sensitivity(exported, batches, ["mxfp6", "mxfp8"], method="gradient", draws=4, **options)
    assert {row.estimate for row in again.rows} == {row.estimate for row in actual.rows} and not again.whole


def test_masked_logits_change_no_number_of_the_others(net):
    class Masked(Net):
        def forward(self, x):
            mask = torch.arange(80) >= 64
            return F.pad(super().forward(x), (0, 16)).masked_fill(mask, -math.inf)

    exported, batches = net
    model = Masked().eval()
    model.load_state_dict(dict(exported.named_parameters()))
    masked = torch.export.export(model, (batches[0],)).module()
    actual, want = (sensitivity(m, batches[:1], ["mxfp4"], metric="kl", method="both") for m in (masked, exported))
    assert len(actual.rows) == 3
    for row, same in zip(actual.rows, want.rows, strict=True):
        assert math.isclose(row.alone, same.alone, rel_tol=1e-6) and 0.5 < row.estimate / row.alone < 2
    assert math.isclose(actual.whole["mxfp4"], want.whole["mxfp4"], rel_tol=1e-6)


def test_modules_without_weights_have_no_rows_of_weights():
    matmul = module_of(lambda self, x: x @ x.mT)
    model = nn.Sequential(nn.Linear(64, 64), matmul)
    exported = torch.export.export(model.eval(), (X,)).module()
    options = {"metric": "noise", "operands": ["weights", "activations"], "method": "both"}
    rows = sensitivity(exported, [X], ["mxfp8"], **options).rows
    assert {(row.module, row.operands) for row in rows} == {
        ("0", "weights"),
        ("0", "activations"),
        ("1", "activations"),
    }
    assert all(row.alone > 0 and row.estimate > 0 for row in rows)
    exported = torch.export.export(matmul.eval(), (X,)).module()
    with pytest.raises(MXError, match=r"the candidates quantize no weights of any module: give other operands"):
        sensitivity(exported, [X], ["mxfp8"], operands=["weights"])


def test_the_model_stays_as_it_is(net):
    exported, batches = net
    before = exported(batches[0])
    sensitivity(exported, batches, "mxfp4", method="both", metric="noise")
    assert torch.equal(exported(batches[0]), before) and not any(p.grad is not None for p in exported.parameters())


def test_a_users_metric_and_configs(net):
    exported, batches = net
    largest = lambda got, want: (got - want).abs().max()  # noqa: E731
    config = pt2mx.get_default_mx_quantization_config(weight="mxfp4", activation=None)
    actual = sensitivity(exported, batches, {"weights in FP4": config}, metric=largest)
    assert actual.of("weights in FP4")["up"].alone > 0
    weight_only = sensitivity(exported, batches, ["mxfp4"], metric=largest, operands=["weights"])
    for name, row in weight_only.of("mxfp4", "weights").items():
        assert row.alone == actual.of("weights in FP4")[name].alone


def test_inputs_by_name_and_subgraphs():
    def forward(self, x, *, bias):
        return torch.cond(x.sum() > 0, self.one, self.two, (self.up(x) + bias,))

    torch.manual_seed(0)
    model = module_of(forward, **{name: nn.Linear(64, 64) for name in ("up", "one", "two")})
    batch = {"x": torch.randn(4, 64), "bias": torch.randn(64)}
    with torch.no_grad():
        exported = torch.export.export(model, (batch["x"],), {"bias": batch["bias"]}).module()
    actual = sensitivity(exported, [batch, {**batch, "x": -batch["x"]}], ["mxfp4"], metric="noise", method="both")
    rows = actual.of("mxfp4")
    assert all(rows[name].alone > 0 and rows[name].estimate > 0 for name in ("up", "one", "two"))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm._flat_weights")  # export's
def test_operators_with_several_outputs_and_inputs_that_are_written():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv1d(64, 64, 1), nn.BatchNorm1d(64), nn.ReLU(inplace=True)
            self.lstm, self.head = nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 64)
            self.norm.running_var.uniform_(0.5, 2)

        def forward(self, x):  # (B, 64, 5)
            x = self.relu(self.norm(self.conv(x)))
            return self.head(self.lstm(x.transpose(1, 2))[0])

    x = torch.randn(32, 64, 5)
    exported = torch.export.export(Recurrent().eval(), (x,)).module()
    actual = sensitivity(exported, [x], ["mxfp8"], metric="noise", method="both", draws=8)
    assert {row.module for row in actual.rows} == {"conv", "lstm", "head"}
    for row in actual.rows:
        assert 0.6 < row.estimate / row.alone < 1.6, row


@pytest.mark.diagonal
@pytest.mark.parametrize("metric", ["kl", "cosine", "noise"])
@pytest.mark.parametrize("shape", [(), (8,), (4, 8), (2, 2, 8)])
def test_outputs_of_any_shape(metric, shape):
    def forward(self, x):
        y = self.linear(x)
        return {"y": {0: y.sum(), 1: y[0], 2: y}.get(len(shape), y.reshape(2, 2, 8)), "label": y.argmax(-1)}

    exported = torch.export.export(module_of(forward, linear=nn.Linear(64, 8)).eval(), (X,)).module()
    (row,) = sensitivity(exported, [X], ["mxfp8"], metric=metric, method="both", draws=4).rows
    assert exported(X)["y"].shape == shape and row.alone >= 0 and row.estimate >= 0


def test_rows_of_zeros_have_no_direction():
    def half_forward(self, x):
        return self.linear(x) * (torch.arange(4) % 2)[:, None]

    exported = torch.export.export(module_of(half_forward, linear=nn.Linear(64, 8)).eval(), (X,)).module()
    actual = sensitivity(exported, [X], ["mxfp8"], metric="cosine", method="both", draws=256)
    got, want = with_only(exported, ["linear"], "mxfp8")(X), exported(X)
    cosines = F.cosine_similarity(got.double(), want.double())[1::2]
    assert math.isclose(actual.rows[0].alone, 1 - cosines.mean().item(), rel_tol=1e-6)
    assert 0.7 < actual.rows[0].estimate / actual.rows[0].alone < 1.4


def test_modules_that_make_nan_are_the_costliest(net):
    exported, batches = net
    prediction = exported(batches[0])

    def distance(got, want):  # in NumPy's numbers, and NaN where a head is quantized
        return np.float32("nan") if "strong" in quantized_in(got) else np.float32(0.5)

    def quantized_in(got):
        strong = with_only(exported, ["strong"])(batches[0])
        return ["strong"] if torch.equal(got, strong) and not torch.equal(got, prediction) else []

    actual = sensitivity(exported, batches[:1], ["mxfp4"], metric=distance)
    assert actual.rows[0].module == "strong" and actual.rows[0].alone == math.inf
    assert {row.alone for row in actual.rows[1:]} == {0.5}
    assert json.loads(actual.to_json())["rows"][0]["alone"] == "inf"


def test_no_gradient():
    detached = module_of(lambda self, x: self.linear(x).detach(), linear=nn.Linear(64, 8))
    exported = torch.export.export(detached.eval(), (X,)).module()
    with pytest.raises(MXError, match=r"no gradient of an output reaches a module: give method='forward'"):
        sensitivity(exported, [X], ["mxfp8"], method="gradient")


def test_buffers_that_a_model_writes_stay():
    def forward(self, x):
        y = self.linear(x)
        self.seen.add_(y.sum(0))
        return y + self.seen

    model = module_of(forward, linear=nn.Linear(64, 64), seen=nn.Buffer(torch.zeros(64)))
    exported = torch.export.export(model.eval(), (X,)).module()
    actual = sensitivity(exported, [X, -X], ["mxfp8"], metric="noise", method="both")
    assert torch.equal(exported.seen, torch.zeros(64)) and not exported.seen.requires_grad
    again = sensitivity(exported, [X, -X], ["mxfp8"], metric="noise", method="both")
    assert actual == again and actual.rows[0].alone > 0


def distance_nan(got, want):
    return math.nan


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": nn.Linear(1, 1)}, "model must be a GraphModule, and is a module"),
        ({"metric": "kll"}, "metric='kll' is unknown: did you mean 'kl'"),
        ({"metric": 3}, "metric must be one of kl, cosine, noise, or a function, not int"),
        ({"metric": max, "method": "gradient"}, "method='gradient' needs one of kl, cosine, noise"),
        ({"method": "backward"}, "method='backward' is unknown"),
        ({"operands": "weights"}, "operands='weights' must be a list of 'both', 'weights', 'activations'"),
        ({"operands": ["weight"]}, "must be a list of 'both', 'weights', 'activations'"),
        ({"batches": []}, "there is no batch"),
        ({"batches": torch.ones(3, 4, 64)}, "batches is one of type Tensor: give a list of batches"),
        ({"batches": None}, "batches is one of type NoneType: give a list of batches"),
        ({"batches": [torch.ones(4, 63)]}, r"the model does not run on inputs of shape \(4, 63\)"),
        ({"batches": [torch.ones(4, 63)], "method": "forward"}, r"the model does not run on inputs of shape \(4, 63\)"),
        ({"batches": [None]}, "the model takes a tensor as x, and a batch holds a NoneType"),
        ({"candidates": 4}, "candidates must be formats, or a dict of configs, not int"),
        ({"method": ["forward"]}, r"method=\['forward'\] is unknown"),
        ({"operands": 3}, "operands=3 must be a list of 'both', 'weights', 'activations'"),
        ({"operands": [["both"]]}, "must be a list of 'both', 'weights', 'activations'"),
        ({"batches": [(1, 2)]}, "the model takes x: give each of them once, not 2 values"),
        ({"candidates": []}, "there is no candidate"),
        ({"candidates": ["mxfp5"]}, "mxfp5"),
        ({"candidates": {"a": "mxfp4"}}, "the candidate 'a' must be an MXQuantizationConfig, not str"),
        ({"draws": 0}, "draws=0 must be an integer of at least 1"),
        ({"seed": "a"}, "seed='a' must be an integer"),
        (
            {"batches": [torch.full((4, 64), math.nan)]},
            "the float model's outputs hold NaN or Inf, no value, or zeros alone",
        ),
        ({"batches": [torch.ones(0, 64)], "metric": "noise"}, "the float model's outputs hold NaN or Inf, no value"),
        ({"metric": lambda got, want: "bad", "method": "forward"}, "the metric gave 'bad': it must give a number"),
        ({"metric": lambda got, want: got, "method": "forward"}, r"the metric gave a Tensor of shape \(64, 64\)"),
        ({"metric": distance_nan, "method": "forward"}, "the metric distance_nan gives nan for the float model"),
    ],
)
def test_errors(net, options, text):
    exported, batches = net
    arguments = {"model": exported, "batches": batches, "method": "gradient", **options}
    with pytest.raises(MXError, match=text):
        sensitivity(arguments.pop("model"), arguments.pop("batches"), **arguments)
