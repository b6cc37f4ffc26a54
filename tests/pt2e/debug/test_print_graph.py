import io

import pytest
import torch
from torch import nn

from pt2mx import MXError, print_graph
from tests.stage_models import stages
from tests.subgraph_models import Branches


def lines(*arguments, **options):
    file = io.StringIO()
    print_graph(*arguments, file=file, **options)
    return file.getvalue().splitlines()


def test_every_node_has_a_line(net):
    exported, forms = net
    for model in (exported, *forms.values()):
        assert len(lines(model)) == 1 + len(model.graph.nodes)


def test_shapes_formats_modules_and_sources(net):
    _, forms = net
    (row,) = [line for line in lines(forms["converted"]) if line.startswith("linear_2 ")]
    name, operator, *_, module, source = row.split()
    assert (name, operator, module) == ("linear_2", "aten.linear", "up") and "f32[2, 32, 256]" in row
    assert source.rpartition(":")[0] == "stage_models.py"
    for form, operator, spec in (
        ("prepared", "call_module", "mxfp8_e4m3{32}"),
        ("converted", "pt2mx.dequantize_mx", "mxfp4_e2m1{32}"),
        ("lowered", "pt2mx.linear_mx", "mxfp4_e2m1{32}"),
    ):
        assert any(operator in line and spec in line for line in lines(forms[form])), form


def test_around(net):
    _, forms = net
    header, *rows = lines(forms["lowered"], "up", hops=0)
    assert header.split()[:3] == ["node", "operator", "shape"]
    assert rows and all(" up " in row for row in rows)
    assert len(rows) < len(lines(forms["lowered"], "up", hops=1)) - 1 < len(lines(forms["lowered"]))
    (row,) = lines(forms["lowered"], "gelu", hops=0)[1:]
    assert row.startswith("gelu  ")


def test_subgraphs():
    _, forms = stages(Branches(), (torch.ones(4, 64),))
    printed = lines(forms["converted"])
    assert [line for line in printed if line.startswith("graph")] == ["graph true_graph_0:", "graph false_graph_0:"]
    assert sum("aten.linear" in line for line in printed) == 2


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")  # export's
def test_long_cells():
    model = nn.LSTM(64, 32, num_layers=2)
    _, forms = stages(model, (torch.ones(3, 2, 64),), "mxfp8", "mxfp8")
    (row,) = [line for line in lines(forms["converted"]) if " aten.lstm.input " in line]
    assert row.endswith(" and 5 more")  # an input, two states and eight weights
    assert any(" aten.lstm.input " in line for line in lines(forms["prepared"]))  # the prepared model calls a module


def test_errors(net):
    exported, _ = net
    with pytest.raises(MXError, match="no node and no module 'linea', the closest are linear, linear_4"):
        print_graph(exported, "linea")
    with pytest.raises(MXError, match="file must be open for writing, or None for stdout, not 'graph"):
        print_graph(exported, file="graph")
    with pytest.raises(MXError, match="hops=-1 must be an integer"):
        print_graph(exported, hops=-1)
    with pytest.raises(MXError, match="model must be a GraphModule, and is a module"):
        print_graph(nn.Linear(1, 1))
