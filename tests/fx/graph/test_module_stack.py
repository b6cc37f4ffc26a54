import pytest
import torch
from torch import nn

from pt2mx.fx.graph.module_stack import module_name, modules_of


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


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
        return x

    @torch.compiler.nested_compile_region
    def block(self, layer, x):
        return layer(x)


def test_names_in_a_graph_inside_after_strict_export():
    model = torch.export.export(Repeated(), (torch.randn(4, 4),), strict=True).module()
    graphs = [m.graph for m in model.modules() if isinstance(m, torch.fx.GraphModule)]
    linears = [n for g in graphs for n in g.find_nodes(op="call_function", target=torch.ops.aten.linear.default)]
    assert {module_name(n) for n in linears} <= {f"layers.{i}" for i in range(3)}
    assert any("_export_root" in str(n.meta["nn_module_stack"]) for n in linears)
