from pathlib import Path

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.fx.graph.source_node import module_name, modules_of, nodes_by_source, source_line, source_name
from tests.models import module_of
from tests.subgraph_models import Repeated

X = torch.randn(2, 32, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.gru._flat_weights")  # export's
def test_what_was_folded_and_items_of_tuples_are_found_in_each_form():
    # a convolution whose batch norm is folded, and an operator with several outputs
    net = module_of(
        lambda self, x: self.gru(self.norm(self.conv(x)).flatten(2)),
        conv=nn.Conv2d(32, 32, 1),
        norm=nn.BatchNorm2d(32),
        gru=nn.GRU(36, 8, batch_first=True),
    )
    exported = torch.export.export(net.eval(), (X,)).module()
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8")))
    again = torch.export.export(torch.export.export(converted, (X,)).module(), (X,)).module()
    assert {"conv2d", "batch_norm", "gru", "gru[0]", "gru[1]"} <= nodes_by_source(exported.graph).keys()
    for form in (converted, again):
        nodes = nodes_by_source(form.graph)
        assert {"batch_norm", "gru[0]", "gru[1]"} <= nodes.keys() and "conv2d" not in nodes
        assert nodes["batch_norm"].target is torch.ops.aten.conv2d.default
        assert [source_name(node) for node in form.graph.output_node().all_input_nodes] == ["gru[0]", "gru[1]"]


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


def test_names_in_a_subgraph_after_strict_export():
    model = torch.export.export(Repeated(), (torch.randn(4, 64),), strict=True).module()
    graphs = [m.graph for m in model.modules() if isinstance(m, torch.fx.GraphModule)]
    linears = [n for g in graphs for n in g.find_nodes(op="call_function", target=torch.ops.aten.linear.default)]
    assert {module_name(n) for n in linears} <= {f"layers.{i}" for i in range(3)}
    assert any("_export_root" in str(n.meta["nn_module_stack"]) for n in linears)


def test_the_line_outside_of_torch():
    node = torch.fx.Graph().placeholder("x")
    assert source_line(node) == ""
    linear = Path(torch.__file__).parent / "nn" / "modules" / "linear.py"
    node.meta["stack_trace"] = (
        'File "/home/me/torch/model.py", line 12, in forward\n    y = self.l(x)\n'
        f'  File "{linear}", line 134, in forward\n    return F.linear()'
    )
    assert source_line(node) == "model.py:12", "a folder of the model's may be called torch"
