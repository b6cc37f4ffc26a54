import operator

import pytest
import torch

from pt2mx.fx.graph.memory_order import accepts_any_strides, accepts_order_of, allow_any_strides
from tests.graph import graph_after_sin


@pytest.mark.parametrize(
    ("after", "may"),
    [
        (lambda x: x @ torch.ones(6, 3), True),  # a matmul chooses its own order
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
def test_users_that_accept_another_order(after, may):
    _, node = graph_after_sin(after)
    with node.meta["val"].fake_mode:
        assert accepts_order_of(node, torch.empty(6, 4).T) == may


aten = torch.ops.aten


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
        (lambda x: torch.nn.functional.dropout(x, training=False) + 1, False),  # may return its input
    ],
)
def test_users_that_accept_other_strides(after, may):
    _, node = graph_after_sin(after)
    assert accepts_any_strides(node) == may


def test_views_become_copies_and_get_new_values():
    model, node = graph_after_sin(lambda x: (x.view(2, 12).transpose(0, 1) + 1, x.split(2)[0] + 1))
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(6, 4).T
    allow_any_strides(node)
    assert not model.graph.find_nodes(op="call_function", target=aten.view.default)
    (view,) = model.graph.find_nodes(op="call_function", target=aten.reshape.default)
    (moved,) = model.graph.find_nodes(op="call_function", target=aten.transpose.int)
    first = model.graph.find_nodes(op="call_function", target=operator.getitem)[0]
    assert view.meta["val"].stride() == (12, 1) and moved.meta["val"].stride() == (1, 12)  # a copy, and a view of it
    assert first.meta["val"].stride() == (1, 4)
