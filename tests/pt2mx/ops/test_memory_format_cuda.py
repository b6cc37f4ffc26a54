"""On an NVIDIA GPU: the order of dimensions in memory is that of x, eager and compiled, as on a CPU."""

import itertools

import pytest
import torch

from tests.compare import same
from tests.memory_order import NAMES, all_operators, laid_out, views
from tests.operators import through_all_operators

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("compiler")]

SHAPES = ((5, 2), (2, 5, 3), (2, 5, 1, 3), (3, 2, 5, 4))


def on_gpu(x):
    """x with the strides that it has."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)


@pytest.mark.parametrize("rounding", ["even", "stochastic"])
@pytest.mark.parametrize("name", NAMES)
def test_orders_and_views(name, rounding):
    dense = (laid_out(s, order) for s in SHAPES for order in itertools.permutations(range(len(s))))
    for x in itertools.chain(dense, (x.clone() for x in views())):
        for axis in range(max(x.dim(), 1)):
            got_all, want_all = (all_operators(t, name, axis, rounding) for t in (on_gpu(x), x))
            for got, want in zip(got_all, want_all, strict=True):
                assert same(got, want) and (not x.numel() or got.stride() == want.stride()), (
                    x.shape,
                    x.stride(),
                    axis,
                )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 1, 0, 2)])
def test_compiled(name, order):
    x = laid_out((2, 40, 3, 5), order)
    run = torch.compile(through_all_operators, fullgraph=True, dynamic=False)
    for got, want in zip(run(on_gpu(x), name, 1), through_all_operators(x, name, 1), strict=True):
        assert same(got, want) and got.stride() == want.stride()
