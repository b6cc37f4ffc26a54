import torch
from torch import nn

from pt2mx.fx.graph.graph_pass import GraphPass


def doubled(model):
    """Add the result to itself."""
    (output,) = model.graph.find_nodes(op="output")
    (result,) = output.all_input_nodes
    with model.graph.inserting_before(output):
        output.replace_input_with(result, model.graph.call_function(torch.add, (result, result)))


def test_what_a_pass_changes_is_told(monkeypatch, capsys):
    monkeypatch.delenv("PT2MX_LOG", raising=False)
    double = GraphPass(doubled)
    assert torch.equal(double(torch.fx.symbolic_trace(nn.ReLU()))(torch.ones(2)), torch.full((2,), 2.0))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("PT2MX_LOG", "other,passes")
    double(torch.fx.symbolic_trace(nn.ReLU()))
    told = capsys.readouterr().err
    assert told.startswith("pt2mx: doubled: ") and told.endswith(" +1\n")
