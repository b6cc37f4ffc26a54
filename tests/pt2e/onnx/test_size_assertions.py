import torch
from torch import nn
from torch.export import Dim

from pt2mx.pt2e.onnx.size_assertions import drop_size_assertions
from tests.compare import same
from tests.flow import convert, reloaded

aten = torch.ops.aten


class Product(nn.Module):
    """Blocks along a dynamic dimension, and a number that the model checks itself."""

    def forward(self, a, b, n):
        size = n.item()
        torch._check(size >= 2)
        return (a @ b) * size


def test_those_of_codes_go_and_others_stay():
    inputs = torch.randn(2, 40), torch.randn(40, 3), torch.tensor(3)
    shapes = ({1: Dim("k")}, {0: Dim("k")}, None)
    converted = convert(Product(), inputs, "mxfp4", shapes=shapes)
    model = reloaded(torch.export.export(converted, inputs, dynamic_shapes=shapes)).module()

    def assertions():
        return len(model.graph.find_nodes(op="call_function", target=aten._assert_scalar.default))

    before, want = assertions(), model(*inputs)
    drop_size_assertions(model)
    assert before - assertions() == 4  # of codes and scales of both operands
    assert assertions() >= 1
    assert same(model(*inputs), want)
