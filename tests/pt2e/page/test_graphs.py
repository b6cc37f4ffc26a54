import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.page.graphs import DrawnGraph, node_positions
from tests.flow import convert, exported
from tests.models import Tied, module_of
from tests.subgraph_models import Branches

IDS = torch.tensor([[1, 2]])


@pytest.fixture(scope="module")
def forms():
    converted = convert(Tied(), (IDS,), "mxfp4")
    return exported(Tied().eval(), IDS), converted, pt2mx.lower_to_inductor(converted)


def test_rows_read_rows(forms):
    before, after, _ = (DrawnGraph.of(model, "model") for model in forms)
    row = before.rows[before.named["linear"]]
    assert row[:5] == ("linear", "aten.linear", "f32[1, 2, 64]", "", "query")
    assert [before.rows[i].name for i in row.inputs] == ["embedding", "query_weight", "query_bias"]
    operands = [after.rows[i] for i in after.rows[after.named["linear"]].inputs]
    assert [(one.operator, one.format) for one in operands[:2]] == [("pt2mx.dequantize_mx", "mxfp4_e2m1{32}")] * 2
    assert all(i < number for number, one in enumerate(after.rows) for i in one.inputs)


def test_items_of_tuples_guards_and_assertions_are_left_out(forms):
    asserted = module_of(lambda self, x: x.split(2)[1].to(torch.float32) + 1)
    for model in (*forms, exported(asserted, torch.ones(4))):
        drawn = DrawnGraph.of(model, "model")
        assert not any(word in row.operator for row in drawn.rows for word in ("getitem", "_guards", "_assert"))
    assert [row.operator for row in drawn.rows] == [
        "placeholder", "aten.split.Tensor", "aten.to.dtype", "aten.add.Tensor", "output",
    ]  # fmt: skip
    assert [row.inputs for row in drawn.rows] == [[], [0], [1], [2], [3]]


def test_positions_of_operators_before_and_after(forms):
    before, converted, lowered = (DrawnGraph.of(model, "model") for model in forms)
    names = [operator.name for operator in pt2mx.quantization_report(forms[1]).operators]
    assert names == ["embedding", "linear", "linear_1", "matmul", "linear_2"]
    for after in (converted, lowered):
        actual = node_positions(names, before, after)
        assert [before.rows[old].name for old, _ in actual] == names
        assert [row.module for row in (after.rows[new] for _, new in actual)][1:3] == ["query", "key"]
    assert all(new is None for _, new in node_positions(names, before, None))
    assert node_positions(["nowhere"], before, converted) == [(None, None)]


def test_subgraphs(forms):
    x = torch.ones(2, 64)
    before, after = exported(Branches().eval(), x), convert(Branches(), (x,))
    names = [operator.name for operator in pt2mx.quantization_report(after).operators]
    drawn = DrawnGraph.of(before, "before"), DrawnGraph.of(after, "after")
    assert names == ["true_graph_0.linear", "false_graph_0.linear"]
    for form, actual in zip(drawn, zip(*node_positions(names, *drawn), strict=True), strict=True):
        assert [form.rows[i].operator for i in actual] == ["aten.linear"] * 2


def test_a_program_is_drawn_as_its_module(forms):
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),))
    assert "linear" in DrawnGraph.of(program, "before").named
    with pytest.raises(MXError, match="before must be a GraphModule, and is a module"):
        DrawnGraph.of(nn.Linear(4, 4), "before")
