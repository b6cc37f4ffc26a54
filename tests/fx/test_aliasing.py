import torch

from pt2mx.fx.aliasing import is_written, storage_root, written_roots
from pt2mx.fx.constants import constant_nodes


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, x, y):
        h = x * 2
        h[:, :4] = 0
        self.cache[1:3] = y[1:3]
        first, _ = y.t().split(4)
        return h + 1, self.cache.t() @ y, first


def test_roots_through_views_splits_and_writes():
    inputs = (torch.randn(4, 8), torch.randn(4, 8))
    model = torch.export.export(Model(), inputs).module()
    roots = written_roots(model.graph)
    nodes = {n.name: n for n in model.graph.nodes}
    multiplied = next(n for n in model.graph.nodes if n.target == torch.ops.aten.mul.Tensor)
    assert multiplied in roots and "cache" in roots
    assert is_written(next(n for n in model.graph.nodes if n.op == "get_attr"), roots)
    assert not is_written(nodes["x"], roots) and not is_written(nodes["y"], roots)
    first = next(iter(model.graph.find_nodes(op="output"))).args[0][2]
    assert storage_root(first) is nodes["y"]


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.randn(3, 4))

    def forward(self, x):
        y = x @ self.cache.t()
        with torch.no_grad():
            self.cache.copy_(x)
        return y


def test_a_graph_inside_writes_its_operands():
    model = torch.export.export(Cache(), (torch.randn(3, 4),)).module()
    assert any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in model.graph.nodes)
    assert "cache" in written_roots(model.graph)
    assert "cache" not in {node.target for node in constant_nodes(model.graph)}
