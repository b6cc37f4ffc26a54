import pytest
import torch
from torch import nn
from torch.export import Dim

from pt2mx.pt2e.packages.dynamic_shapes import dynamic_shapes
from pt2mx.pt2e.packages.sizes import input_nodes, ranges


class Net(nn.Module):
    def forward(self, x, pair, k=None, flag=True):
        y = x @ pair["a"].t() + k[:, :1]
        return y if flag else y + pair["b"]


@pytest.fixture
def program():
    batch = Dim("batch", min=2, max=99)
    pair = {"a": torch.randn(11, 8), "b": torch.randn(3)}
    shapes = {"x": {0: batch}, "pair": {"a": {0: 2 * batch + 3}, "b": None}, "k": {0: batch, 1: Dim("width")}}
    kwargs = {"k": torch.randn(4, 12), "flag": True}
    return torch.export.export(
        Net(), (torch.randn(4, 8), pair), kwargs, dynamic_shapes={**shapes, "flag": None}, strict=False
    )


def test_exported_again_a_program_takes_the_same_shapes(program):
    """One dimension in two inputs, a linear function of it, one without a bound; trees, keywords and a constant."""
    module = program.module()
    shapes = dynamic_shapes(program, module)
    again = torch.export.export(module, *program.example_inputs, dynamic_shapes=shapes)
    assert ranges(again) == ranges(program)
    x, a, b, k, flag = (node.meta["val"] for node in input_nodes(again))
    assert flag is True and b.shape == (3,)
    assert x.shape[0] == k.shape[0] and a.shape[0] == 2 * x.shape[0] + 3 and k.shape[1] != x.shape[0]
    with pytest.raises(AssertionError):
        again.module()(
            torch.randn(4, 8), {"a": torch.randn(12, 8), "b": torch.randn(3)}, k=torch.randn(4, 1), flag=True
        )


def test_ranges(program):
    assert ranges(program) == [[(2, 99), (8, 8)], [(7, 201), (8, 8)], [(3, 3)], [(2, 99), (0, None)], None]


def test_static_shapes():
    program = torch.export.export(nn.Linear(4, 2), (torch.randn(3, 4),))
    assert dynamic_shapes(program, program.module()) == ({},) and ranges(program) == [[(3, 3), (4, 4)]]


def test_minilm(minilm):
    module = minilm.program.module()
    again = torch.export.export(module, minilm.args, dynamic_shapes=dynamic_shapes(minilm.program, module))
    assert ranges(again) == ranges(minilm.program) and [most for _, most in ranges(again)[0]] == [None, 512]
    tokens, mask = (node.meta["val"] for node in input_nodes(again))
    assert tokens.shape == mask.shape and isinstance(tokens.shape[0], torch.SymInt)
