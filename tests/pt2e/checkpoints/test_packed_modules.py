"""Transposes after decoded weights are folded into the codes, once for all that read them."""

import pytest
import torch
from torch import nn

from pt2mx import ops, parse, quantize_mx
from pt2mx.fx.graph.node import Dequantize
from pt2mx.pt2e.checkpoints.packed_modules import fold_transposes

SPEC = parse("mxfp4").replace(axis=0)
X = torch.randn(3, 64)


class Twice(nn.Module):
    """A packed weight, (K, N) or (N, K), that two calls decode; what a call does with it."""

    def __init__(self, *after):
        super().__init__()
        self.after = after
        scale, data = quantize_mx(torch.randn(64, 64), SPEC)
        self.register_buffer("data", data)
        self.register_buffer("scale", scale)

    def forward(self, x):
        decoded = [Dequantize(self.data, self.scale, SPEC, torch.float32, 64, None).call() for _ in self.after]
        return [after(weight) * x[0] for after, weight in zip(self.after, decoded, strict=True)]


def exported(*after):
    return torch.export.export(Twice(*after), (X,)).module()


def transposed(weight):
    return weight.transpose(0, 1)


def from_the_end(weight):
    return weight.transpose(-1, -2)


@pytest.mark.parametrize("after", [(transposed,), (transposed, transposed), (transposed, from_the_end)])
def test_every_reader_transposes(after):
    model = exported(*after)
    want = model(X)
    assert fold_transposes(model)
    calls = [call for _, call in Dequantize.calls_in(model.graph)]
    assert len(calls) == len(after) and all(call.spec.axis == 1 for call in calls)
    assert not model.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)
    assert all(map(torch.equal, model(X), want))


def test_a_reader_that_does_not_transpose():
    model = exported(transposed, torch.neg)
    want = model(X)
    assert not fold_transposes(model)
    assert all(map(torch.equal, model(X), want))


def test_codes_that_nothing_reads():
    model = exported(transposed)
    for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        node.replace_all_uses_with(node.args[1])
        model.graph.erase_node(node)
    model.graph.erase_node(model.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)[0])
    assert model.graph.find_nodes(op="call_function", target=ops.dequantize_mx) and not fold_transposes(model)
