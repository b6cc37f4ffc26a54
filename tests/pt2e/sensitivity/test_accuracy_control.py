import math

import numpy as np
import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, quantize_with_accuracy_control


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval(), torch.randn(32, 64)
    for i, layer in enumerate(model):
        layer.weight.data *= 1 + i / 4  # so that all costs differ
    exported = torch.export.export(model, (x,)).module()
    return exported, x, exported(x)


def quality(net):
    _, x, want = net
    calls = []

    def evaluate(graph):
        calls.append(graph)
        return -((graph(x) - want).norm() / want.norm()).item()

    return evaluate, calls


QUANTIZER = pt2mx.MXQuantizer.from_recipe("mxfp4")


def test_the_fewest_modules_are_lifted(net):
    evaluate, calls = quality(net)
    order = ["3", "0", "5", "1", "2", "4"]
    whole = quantize_with_accuracy_control(net[0], QUANTIZER, evaluate, 10.0, order=order)
    assert whole.lifted == () and whole.float_score == 0 and len(calls) == 2
    drops = []
    for count in range(6):
        quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4")
        for name in order[:count]:
            quantizer.set_module_name(name, None)
        drops.append(-evaluate(pt2mx.convert_pt2e(pt2mx.prepare_pt2e(net[0], quantizer))))
    assert drops == sorted(drops, reverse=True)
    for count, drop in enumerate(drops):
        calls.clear()
        actual = quantize_with_accuracy_control(net[0], QUANTIZER, evaluate, drop, order=order)
        assert actual.lifted == tuple(order[:count]) and math.isclose(actual.score, -drop) and len(calls) <= 5
        again = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(net[0], actual.quantizer))
        assert torch.equal(again(net[1]), actual.model(net[1]))
    with pytest.raises(MXError, match="the quality drops by more than max_drop=0 though '4' alone is quantized"):
        quantize_with_accuracy_control(net[0], QUANTIZER, evaluate, 0, order=order)


def test_static_tensor_scales_follow_from_the_batches(net):
    evaluate, _ = quality(net)
    quantizer = pt2mx.MXQuantizer().set_global(pt2mx.MXQuantizationConfig("nvfp4", "nvfp4"))
    actual = quantize_with_accuracy_control(net[0], quantizer, evaluate, 10.0, batches=[net[1]])
    prepared = pt2mx.prepare_pt2e(net[0], quantizer)
    prepared(net[1])
    assert actual.lifted == () and torch.equal(pt2mx.convert_pt2e(prepared)(net[1]), actual.model(net[1]))
    with pytest.raises(MXError, match="follow from batches, and none reached a tensor: give batches"):
        quantize_with_accuracy_control(net[0], quantizer, evaluate, 10.0)


def test_an_order_is_found_by_evaluating(net):
    evaluate, _ = quality(net)
    actual = quantize_with_accuracy_control(net[0], QUANTIZER, evaluate, 0.3, batches=[net[1]])
    costs = {}
    for name in map(str, range(6)):
        quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4")
        for other in map(str, range(6)):
            if other != name:
                quantizer.set_module_name(other, None)
        costs[name] = evaluate(pt2mx.convert_pt2e(pt2mx.prepare_pt2e(net[0], quantizer)))
    assert actual.lifted == tuple(sorted(costs, key=costs.get)[: len(actual.lifted)]) and actual.lifted
    assert actual.score >= -0.3
    assert pt2mx.quantization_report(actual.model).operators


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantizer": "mxfp4"}, "expected an MXQuantizer, not str"),
        ({"max_drop": -1}, "max_drop=-1 must be a number of at least 0"),
        ({"order": ["9"]}, "the quantizer quantizes no module '9'"),
        ({"evaluate": lambda graph: "good"}, "evaluate gave 'good': it must give a number"),
        ({"evaluate": lambda graph: math.nan}, "evaluate gave nan: it must give a number"),
        ({"evaluate": lambda graph: -math.inf}, "evaluate gave -inf for the float model: no drop from it can be told"),
        ({"evaluate": lambda graph: torch.ones(2)}, r"evaluate gave a Tensor of shape \(2,\): it must give a number"),
        ({"evaluate": 3}, "evaluate must be a function of a graph module, not int"),
        ({"order": "0"}, "order must be a list of modules, not str"),
        ({"order": 3}, "order must be a list of modules, not int"),
        ({"batches": torch.ones(32, 64)}, "batches is one of type Tensor: give a list of batches"),
        ({"quantizer": pt2mx.MXQuantizer().set_module_name("0", None)}, "the quantizer quantizes nothing of the model"),
        ({"model": 3}, "model must be a GraphModule, and is of type int"),
    ],
)
def test_errors(net, options, text):
    arguments = {"model": net[0], "quantizer": QUANTIZER, "evaluate": quality(net)[0], "max_drop": 1.0, **options}
    with pytest.raises(MXError, match=text):
        quantize_with_accuracy_control(**arguments)


def test_scores_of_other_libraries_and_quality_that_is_lost(net):
    def evaluate(graph):
        linears = sum("linear" in str(node.target) for node in graph.graph.nodes)
        quantized = sum("dequantize_mx" in str(node.target) for node in graph.graph.nodes)
        return np.float32(-math.inf if quantized > linears else 1)

    actual = quantize_with_accuracy_control(net[0], QUANTIZER, evaluate, 0.5, order=list("012345"))
    assert (actual.lifted, actual.score, actual.float_score) == (("0", "1", "2"), 1, 1)  # an infinite drop is one


def test_operators_of_the_root_cannot_be_lifted():
    x = torch.ones(2, 64)
    exported = torch.export.export(nn.Linear(64, 8).eval(), (x,)).module()
    with pytest.raises(MXError, match="quantizes nothing of the model in a module with a name"):
        quantize_with_accuracy_control(exported, QUANTIZER, lambda graph: 1.0, 1.0)
