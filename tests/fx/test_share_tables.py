import io

import torch
from torch import nn

from pt2mx.fx.share_tables import share_tables

aten = torch.ops.aten


class Draws(nn.Module):
    def forward(self, x):  # (3,) -> three times (3,)
        return x + torch.arange(3) * 2, x + torch.arange(3) * 2, x + torch.arange(4)[1:] + torch.rand(3) - torch.rand(3)


def test_equal_tables_alone_are_shared():
    x = torch.ones(3)
    program = torch.export.export(Draws(), (x,)).run_decompositions()
    first, second, _ = share_tables(program).module()(x)
    assert torch.equal(first, torch.tensor([1.0, 3.0, 5.0])) and torch.equal(second, first)
    tables = [node.args for node in program.graph.find_nodes(op="call_function", target=aten.arange.start_step)]
    assert [args[:2] for args in tables] == [(0, 3), (0, 4)]
    assert len(program.graph.find_nodes(op="call_function", target=aten.rand.default)) == 2


class Returns(nn.Module):
    def forward(self, x):  # (3,) -> (3,), and equal tables, which stay two
        return x + torch.zeros(3), torch.zeros(3), torch.zeros(3)


def test_a_program_may_return_tables():
    program = share_tables(torch.export.export(Returns(), (torch.ones(3),)).run_decompositions())
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    first, second, third = torch.export.load(buffer).module()(torch.ones(3))
    second += 1
    assert torch.equal(first, torch.ones(3)) and torch.equal(third, torch.zeros(3))


class Branches(nn.Module):
    def forward(self, x):  # (3,) -> (3,)
        return torch.cond(x.sum() > 0, lambda x: x + torch.ones(3) * torch.ones(3), lambda x: x - 1, (x,))


def test_subgraphs_share_tables_of_their_own():
    x = torch.ones(3)
    program = share_tables(torch.export.export(Branches(), (x,)).run_decompositions())
    assert torch.equal(program.module()(x), x + 1)
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    assert sum(len(graph.find_nodes(op="call_function", target=aten.full.default)) for graph in graphs) == 1
