import pytest
import torch

from pt2mx.fx.graph.memory_order import accepts_order_of
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
