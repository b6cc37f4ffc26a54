import pytest
import torch
from torch import nn

from pt2mx.fx.module_stack import module_name, modules_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])

    def forward(self, x):
        return self.layers[0](x) @ x


@pytest.mark.parametrize("strict", [False, True])
def test_names_and_types_outermost_first(strict):
    model = torch.export.export(Block(), (torch.randn(4, 4),), strict=strict).module()
    linear = next(iter(model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)))
    matmul = next(iter(model.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)))
    names, types = zip(*modules_of(linear), strict=True)
    assert names[0] == "" and names[-1] == "layers.0.0"
    assert types[-1] == "torch.nn.modules.linear.Linear" and types[0].endswith("Block")
    assert module_name(linear) == "layers.0.0" and module_name(matmul) == ""
