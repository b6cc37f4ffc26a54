import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.fx.graph.node import Dequantize
from pt2mx.pt2e.checkpoints.packed_modules import Inputs, fold_transposes, replace_parameter
from pt2mx.pt2e.models.weight_formats import PackedTensors


class Experts(nn.Module):
    """Experts with a packed weight, (2, 64, 24); with_alias: two parameters of the same codes."""

    def __init__(self, forward, with_alias=False):
        super().__init__()
        self.run, spec = forward, pt2mx.parse("mxfp4")
        scale, data = pt2mx.quantize_mx(torch.randn(2, 24, 64), spec)
        names = ["weight", "alias"] if with_alias else ["weight"]
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(2, 64, 24)))
            replace_parameter(self, name, PackedTensors(data, scale, spec), Inputs(), transposed=True)
        if with_alias:
            self.alias_data, self.alias_scale = self.weight_data, self.weight_scale

    def forward(self, x):
        return self.run(self, x)


def exported(forward, with_alias=False):
    x = torch.randn(2, 5, 24)
    return torch.export.export(Experts(forward, with_alias), (x,)).module(), x


def twice(self, x):
    return x @ self.weight.transpose(1, 2) + x @ self.weight.transpose(-1, -2)


def with_alias(self, x):
    return x @ self.weight.transpose(1, 2) + x @ self.alias.transpose(2, 1)


def in_one_call(self, x):
    weight = self.weight
    return x @ weight.transpose(1, 2) + x @ weight.transpose(1, 2)


def read_as_it_is_too(self, x):
    return x @ self.weight.transpose(1, 2) + self.weight.sum()


def swapped_otherwise_too(self, x):
    return x @ self.weight.transpose(1, 2) + self.weight.transpose(0, 1).sum()


def codes_read_too(self, x):
    return x @ self.weight.transpose(1, 2) + self.weight_data.sum()


@pytest.mark.parametrize("forward", [twice, with_alias, in_one_call])
def test_codes_are_transposed_once(forward):
    graph, x = exported(forward, forward is with_alias)
    before = graph(x)
    assert fold_transposes(graph)
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)
    assert graph.weight_data.shape == (2, 24, 32) and graph.weight_data.is_contiguous()
    for node, call in Dequantize.calls_in(graph.graph):
        assert call.spec.axis == 2 and node.meta["val"].shape == (2, 24, 64)
        assert call.codes.meta["val"].shape == graph.weight_data.shape
    assert torch.equal(graph(x), before)
    assert not fold_transposes(graph)


@pytest.mark.parametrize("forward", [read_as_it_is_too, swapped_otherwise_too, codes_read_too])
def test_codes_that_are_read_in_several_ways_stay(forward):
    graph, x = exported(forward)
    before, code = graph(x), graph.code
    assert not fold_transposes(graph)
    assert graph.code == code and torch.equal(graph(x), before)


def test_a_result_that_nothing_reads():
    graph, x = exported(twice)
    before = graph(x)
    (node, _), *_ = Dequantize.calls_in(graph.graph)
    with graph.graph.inserting_after(node):
        graph.graph.node_copy(node)
    graph.recompile()
    assert fold_transposes(graph)
    assert torch.equal(graph(x), before)
