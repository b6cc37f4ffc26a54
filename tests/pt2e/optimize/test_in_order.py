"""Weights rounded in the order of the graph, each for the inputs that the rounded layers before it give."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.algorithms import GPTQ, Rotation, ScaleSearch, gptq
from tests.models import chain, module_of, tied
from tests.pt2e.optimize.test_learned_rounding import FP4, W4, W4A4, error, net


def three_layers():
    first, second, third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 16)
    return chain(first=first, relu=nn.ReLU(), second=second, relu_1=nn.ReLU(), third=third)


def _optimized(graph, quantizer, batches, correction, *others):
    return pt2mx.optimize(graph, quantizer, batches, algorithms=(*others, ScaleSearch(), GPTQ(correction=correction)))


@pytest.mark.parametrize(("quantizer", "less"), [(W4, 0.9), (W4A4, 0.75)], ids=["W4", "W4A4"])
def test_outputs_come_nearer_than_for_float_inputs(quantizer, less):
    graph, batches, x = net(three_layers())
    errors = [error(_optimized(graph, quantizer, batches, c), quantizer, graph, x) for c in (None, 0.5)]
    assert errors[1] < less * errors[0]


def test_weights_are_those_of_the_formula():
    """Each layer by hand: the least-squares weight for the rounded inputs, half of the way, and then GPTQ."""
    graph, batches, _ = net(three_layers())
    optimized, model = _optimized(graph, W4A4, batches, 0.5), three_layers()
    model.load_state_dict(graph.state_dict())
    with torch.no_grad():
        exact = rough = torch.cat(batches)
        for name in ("first", "second", "third"):
            layer, rounded = model.get_submodule(name), optimized.state_dict()[f"{name}.weight"]
            inputs = pt2mx.fake_quantize_mx(rough, FP4)
            products, drift = inputs.T @ inputs, (exact - inputs).T @ inputs
            damped = products + 0.01 * products.diagonal().mean() * torch.eye(len(products))
            goal = layer.weight + 0.5 * layer.weight @ drift @ damped.inverse()
            rows = len(inputs)
            expected = gptq(goal, products, FP4, damping=0.01 + 0.5 * products.shape[0] / rows)
            assert (rounded != expected).float().mean() < 0.02  # sums in another order may turn a tie
            exact = torch.relu(layer(exact))
            rough = torch.relu(nn.functional.linear(inputs, rounded, layer.bias))


def test_all_of_a_rotated_model_is_rounded_once_and_float_stays():
    graph, batches, x = net(three_layers())
    before = {name: tensor.clone() for name, tensor in graph.state_dict().items()}
    optimized = _optimized(graph, W4A4, batches, 1, Rotation())
    assert all(torch.equal(tensor, before[name]) for name, tensor in graph.state_dict().items())
    report = pt2mx.optimization_report(optimized)
    assert [row.algorithm for row in report.weights] == ["gptq"] * 3 and all(
        row.rotated == 32 for row in report.weights
    )
    plain = _optimized(graph, W4A4, batches, None, Rotation())
    assert error(optimized, W4A4, graph, x) < error(plain, W4A4, graph, x)


def test_a_weight_of_two_layers_is_rounded_for_float_inputs():
    tied = module_of(
        lambda self, x: self.head(torch.relu(self.layer(torch.relu(self.layer(x))))),
        layer=nn.Linear(32, 32),
        head=nn.Linear(32, 8),
    )
    graph, batches, _ = net(tied)
    weights = [_optimized(graph, W4, batches, c).state_dict() for c in (None, 1.0)]
    assert torch.equal(weights[0]["layer.weight"], weights[1]["layer.weight"])
    assert not torch.equal(weights[0]["head.weight"], weights[1]["head.weight"])


class Writes(nn.Module):
    """A net with an activation in place, and a buffer that it reads and writes."""

    def __init__(self, in_place):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 16)
        self.relu = nn.ReLU(inplace=in_place)
        self.register_buffer("mean", torch.zeros(64))
        self.writes = in_place

    def forward(self, x):
        x = self.relu(self.second(self.relu(self.first(x))))
        shifted = self.mean + x.mean(0)
        if self.writes:
            self.mean.copy_(shifted)
        return self.third(x - shifted)


def test_a_graph_that_writes_has_the_weights_of_one_that_does_not():
    weights = []
    for in_place in (True, False):
        torch.manual_seed(1)
        graph, batches, _ = net(Writes(in_place))
        weights.append(_optimized(graph, W4A4, batches, 0.5).state_dict())
        assert torch.equal(graph.state_dict()["mean"], torch.zeros(64))
    plain = _optimized(graph, W4A4, batches, None).state_dict()
    assert torch.equal(weights[0]["mean"], torch.zeros(64))
    for name in ("first", "second", "third"):
        assert torch.equal(*(found[f"{name}.weight"] for found in weights))
    assert not torch.equal(plain["second.weight"], weights[0]["second.weight"])


def test_both_runs_draw_the_same_numbers():
    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(x + 0.5 * torch.randn_like(x))

    graph, batches, _ = net(module_of(forward, first=nn.Linear(32, 64), second=nn.Linear(64, 16)))
    torch.manual_seed(1)
    corrected = _optimized(graph, W4, batches, 1.0).state_dict()["second.weight"]
    weight = graph.state_dict()["second.weight"]
    assert float((corrected - weight).norm() / weight.norm()) < 0.2


def test_a_weight_in_two_formats():
    sizes = {"first": 32, "second": 32, "last": 8}
    model = chain(**{name: nn.Linear(32, size, bias=False) for name, size in sizes.items()})
    graph, batches, _ = net(tied(model, "first", "second"))
    int8 = get_default_mx_quantization_config(weight="mxint8", activation=None)
    fp4 = get_default_mx_quantization_config(weight=FP4, activation=None)
    quantizer = MXQuantizer().set_global(fp4).set_module_name("second", int8)
    rounded = _optimized(graph, quantizer, batches, 1.0).state_dict()["last.weight"]
    with torch.no_grad():
        shared, last = graph.state_dict()["first.weight"], graph.state_dict()["last.weight"]
        x = torch.cat(batches)
        inputs = x @ pt2mx.fake_quantize_mx(shared, FP4).T @ pt2mx.fake_quantize_mx(shared, int8.weight).T
        products, drift = inputs.T @ inputs, (x @ shared.T @ shared.T - inputs).T @ inputs
        goal = last + last @ drift @ (products + 0.01 * products.diagonal().mean() * torch.eye(32)).inverse()
        expected = gptq(goal, products, FP4, damping=0.01 + 0.5 * 32 / len(x))
        assert (rounded != expected).float().mean() < 0.05


def test_padding_does_not_count():
    torch.manual_seed(0)
    masked = module_of(
        lambda self, x, attention_mask: self.second(torch.relu(self.first(x))) * attention_mask[..., None],
        first=nn.Linear(32, 32),
        second=nn.Linear(32, 8),
    )
    model, x, mask = masked.eval(), torch.randn(4, 16, 32), torch.ones(4, 16, dtype=torch.int64)
    mask[:, 10:] = 0
    graph = torch.export.export(model, (x, mask)).module()
    noisy = torch.where(mask[..., None] == 1, x, 100 * x)
    weights = [
        pt2mx.optimize(
            graph, W4A4, [(inputs, mask)], algorithms=(GPTQ(correction=1.0),), padding_mask="attention_mask"
        ).state_dict()
        for inputs in (x, noisy)
    ]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


def test_options_that_do_not_go_together():
    graph, batches, _ = net(three_layers())
    with pytest.raises(MXError, match=r"GPTQ\(correction=2\): correction must be a number from 0 to 1"):
        GPTQ(correction=2)
    for given in ({"group": object()}, {"in_place": True}, {"anchor": "mxint8"}):
        with pytest.raises(MXError, match="runs all batches together: give neither in_place, group nor anchor"):
            pt2mx.optimize(graph, W4, batches, algorithms=(GPTQ(correction=0.5),), **given)
    with pytest.raises(MXError, match="run calibration batch 1"):
        pt2mx.optimize(graph, W4, [(torch.randn(128, 8),)], algorithms=(GPTQ(correction=0.5),))
