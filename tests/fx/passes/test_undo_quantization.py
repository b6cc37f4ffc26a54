import torch
from torch import nn

from pt2mx import MXQuantizationConfig, MXQuantizer, ops, packed_weights
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.undo_quantization import restore_codes, undo_quantization
from tests.flow import convert
from tests.models import IDS, Tied
from tests.subgraph_models import Cond

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def targets(model):
    return {node.target for node in model.graph.nodes}


def test_parameters_have_the_values_of_the_codes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 70), nn.Linear(70, 3)).eval()
    graph = convert(model, (X,), "mxfp6_weights_mxfp8_activations")
    weights = {one.name: one for one in packed_weights(graph)}
    decoded = undo_quantization(graph)
    assert targets(graph).isdisjoint((ops.quantize_mx, ops.dequantize_mx))
    assert decoded.keys() == weights.keys() == {"0.weight", "1.weight"}
    for name, weight in weights.items():
        parameter = graph.get_parameter(name)
        assert torch.equal(parameter, weight.dequantized()) and not parameter.requires_grad
        assert decoded[name].tensors["codes"] is weight.codes and decoded[name].spec == weight.spec
    assert set(graph.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    with torch.no_grad():
        expected = nn.functional.linear(X, weights["0.weight"].dequantized(), model[0].bias)
        expected = nn.functional.linear(expected, weights["1.weight"].dequantized(), model[1].bias)
    assert torch.equal(graph(X), expected)


def test_what_is_decoded_is_encoded_again():
    for model, x in ((Tied(), IDS), (Cond(), X)):
        config = MXQuantizationConfig(weight="mxfp4")
        converted = convert(model.eval(), (x,), MXQuantizer().set_global(config))
        graph = copy_sharing_tensors(converted)
        decoded = undo_quantization(graph)
        restore_codes(graph, decoded)
        assert torch.equal(graph(x), converted(x))
        assert {name: tensor.data_ptr() for name, tensor in graph.state_dict().items()} == {
            name: tensor.data_ptr() for name, tensor in converted.state_dict().items()
        }
        again = {one.name: one for one in packed_weights(graph)}
        for one in packed_weights(converted):
            assert torch.equal(again[one.name].codes, one.codes) and again[one.name].spec == one.spec


def test_a_tied_weight_is_one_parameter():
    graph = convert(Tied().eval(), (IDS,), "mxfp4_weight_only")
    decoded = undo_quantization(graph)
    users = [node.target for node in graph.graph.find_nodes(op="get_attr") for _ in node.users]
    assert sorted(map(users.count, decoded)) == [1, 1, 1, 2] and users.count("head.weight") == 2


def test_nothing_packed():
    graph = torch.export.export(nn.Linear(64, 8), (X,)).module()
    code = graph.code
    assert undo_quantization(graph) == {} and graph.code == code
