import pytest
import torch
from torch import nn

from pt2mx import ops
from pt2mx.fx.graph.graph_pass import GraphPass, graph_pass, run_passes
from pt2mx.fx.graph.node import FakeQuantize

aten = torch.ops.aten


def doubled(model):
    """Add the result to itself."""
    (output,) = model.graph.find_nodes(op="output")
    (result,) = output.all_input_nodes
    with model.graph.inserting_before(output):
        output.replace_input_with(result, model.graph.call_function(aten.add.Tensor, (result, result)))


def test_a_pass_logs_what_it_changes(monkeypatch, capsys):
    monkeypatch.delenv("PT2MX_LOG", raising=False)
    double = GraphPass(doubled)
    assert torch.equal(double(torch.fx.symbolic_trace(nn.ReLU()))(torch.ones(2)), torch.full((2,), 2.0))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("PT2MX_LOG", "other,passes")
    double(torch.fx.symbolic_trace(nn.ReLU()))
    assert capsys.readouterr().err == "pt2mx: doubled: aten.add.Tensor +1\n"


@pytest.mark.parametrize(
    ("reads", "applies"),
    [
        ((), True),
        ((aten.relu.default,), True),
        ((aten.relu.default, FakeQuantize), True),
        ((aten.add.Tensor,), False),
        ((aten.relu.default, aten.add.Tensor), False),
        ((aten.relu.default, aten.relu.default), False),
        (((aten.relu.default, FakeQuantize), (aten.relu.default, FakeQuantize)), True),
        (((aten.add.Tensor, ops.fake_quantize_mx),), True),
        ((aten.relu.default, (aten.add.Tensor, aten.mul.Tensor)), False),
    ],
)
def test_a_pass_applies_where_the_graph_calls_what_it_reads(reads, applies):
    graph = torch.fx.Graph()
    x = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    graph.output(graph.call_function(ops.fake_quantize_mx, (x, "fp8_e4m3")))
    model = torch.fx.GraphModule(nn.Module(), graph)
    double = graph_pass(*reads)(doubled)
    assert double.applies_to(model) == applies
    double(model)
    assert len(model.graph.find_nodes(op="call_function", target=aten.add.Tensor)) == applies


def test_a_pass_reads_what_an_earlier_one_left():
    """The next pass sees inserted, erased and changed nodes."""
    graph = torch.fx.Graph()
    x = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    graph.output(x)
    model, ran = torch.fx.GraphModule(nn.Module(), graph), []

    def become_silu(model):
        x.target = aten.silu.default

    def remember(model):
        ran.append(True)

    run_passes(model, [GraphPass(become_silu), graph_pass(aten.relu.default)(remember)])
    assert not ran
    run_passes(model, [GraphPass(doubled), graph_pass(aten.silu.default, aten.add.Tensor)(remember)])
    assert ran
