import torch
from torch import nn

from pt2mx.fx.nested import graph_modules


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        def nested(x):
            return torch.cond(x.max() > 1, lambda x: x @ x, lambda x: x * 2, (x,))

        return self.outer(torch.cond(x.sum() > 0, lambda x: nested(self.inner(x)), lambda x: x + 1, (x,)))


def test_every_graph_once_outer_ones_first():
    model = torch.export.export(Branches(), (torch.randn(4, 4),)).module()
    found = list(graph_modules(model))
    assert [path for path, _ in found] == [
        "", "true_graph_0", "true_graph_0.true_graph_0", "true_graph_0.false_graph_0", "false_graph_0",
    ]  # fmt: skip
    assert found[0][1] is model and found[2][1] is model.true_graph_0.true_graph_0


def test_a_graph_without_others():
    model = torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),)).module()
    assert list(graph_modules(model)) == [("", model)]
