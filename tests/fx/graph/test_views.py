import operator

import pytest
import torch

from pt2mx.fx.graph.views import allow_any_strides, may_be_ordered_as, may_be_strided

aten = torch.ops.aten
X = torch.randn(4, 6)


def graph_of(after):
    class Model(torch.nn.Module):
        def forward(self, x):
            return after(torch.sin(x))

    model = torch.export.export(Model(), (X,)).module()
    (node,) = model.graph.find_nodes(op="call_function", target=aten.sin.default)
    return model, node


@pytest.mark.parametrize(
    ("after", "may"),
    [
        (lambda x: x + 1, True),
        (lambda x: x.view(24) + 1, True),
        (lambda x: x.chunk(2)[0] @ x.T, True),
        (lambda x: torch.nn.functional.linear(x, x), True),
        (lambda x: x, False),  # leaves the graph
        (lambda x: x.view(24), False),
        (lambda x: x.view(torch.int32) + 1, False),
        (lambda x: x.as_strided((4,), (1,)) + 1, False),
        (lambda x: aten.as_strided_copy(x, (4,), (1,)) + 1, False),
        (lambda x: torch.nn.functional.dropout(x, training=False) + 1, False),  # may give what it was given
    ],
)
def test_who_takes_other_strides(after, may):
    _, node = graph_of(after)
    assert may_be_strided(node) == may


def test_views_become_copies_and_are_told_as_they_are():
    model, node = graph_of(lambda x: (x.view(2, 12).transpose(0, 1) + 1, x.split(2)[0] + 1))
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(6, 4).T
    allow_any_strides(node)
    assert not model.graph.find_nodes(op="call_function", target=aten.view.default)
    (view,) = model.graph.find_nodes(op="call_function", target=aten.reshape.default)
    (moved,) = model.graph.find_nodes(op="call_function", target=aten.transpose.int)
    first = model.graph.find_nodes(op="call_function", target=operator.getitem)[0]
    assert view.meta["val"].stride() == (12, 1) and moved.meta["val"].stride() == (1, 12)  # a copy, and a view of it
    assert first.meta["val"].stride() == (1, 4)


@pytest.mark.parametrize(
    ("after", "may"),
    [
        (lambda x: x @ torch.ones(6, 3), True),  # a matmul has an order of its own
        (lambda x: x.T @ torch.ones(4, 3), True),
        (lambda x: x.sum(), True),
        (lambda x: x + 1, False),  # the sum would be transposed too
        (lambda x: x.T + 1, False),
        (lambda x: x, False),
        (lambda x: x.view(24) @ torch.ones(24), False),
        (lambda x: x.as_strided((4,), (1,)) @ torch.ones(4), False),
        (lambda x: torch.sort(x)[0].sum(), False),
    ],
)
def test_who_takes_another_order(after, may):
    _, node = graph_of(after)
    with node.meta["val"].fake_mode:
        assert may_be_ordered_as(node, torch.empty(6, 4).T) == may
