"""The order of dimensions in memory: every operator keeps it, on every kernel, faked, traced and compiled."""

import itertools

import pytest
import torch

from pt2mx.ops.memory_format import dense_strides, order_in_memory
from tests.compare import same
from tests.memory_order import NAMES, all_operators, laid_out, views


def dense_tensors(*ranks, sizes=(1, 2, 5)):
    """Every order of every shape."""
    for rank in ranks:
        for shape in itertools.product(sizes, repeat=rank):
            for order in itertools.permutations(range(rank)):
                yield laid_out(shape, order)


def wanted_strides(x):
    """Those of a pointwise operator's result; a dimension without a second value has the one that is dense."""
    like = torch.empty_like(x)
    return tuple(dense_strides(like.shape, order_in_memory(like)))


def test_dense_tensors_have_their_own_strides():
    for x in dense_tensors(1, 2, 3, 4, sizes=(0, 1, 2, 3)):
        assert tuple(dense_strides(x.shape, order_in_memory(x))) == x.stride() == wanted_strides(x)


def test_views_have_the_strides_of_a_pointwise_result():
    """But for those of dimensions without a second value, which address nothing: they are dense too."""
    for x in views():
        got, want = dense_strides(x.shape, order_in_memory(x)), torch.empty_like(x).stride()
        for d, n in enumerate(x.shape):
            assert got[d] == want[d] or n < 2 or not x.numel(), (x.shape, x.stride(), got, want)


def check(x, name, axis, rounding="even"):
    """The numbers are those of a contiguous tensor, the strides follow x, and the fake kernels tell them."""
    results = all_operators(x, name, axis, rounding)
    want = all_operators(x.clone(memory_format=torch.contiguous_format), name, axis, rounding)
    context = (x.shape, x.stride(), name, axis)
    assert all(map(same, results, want)), context
    fake, clipped, scale, data, again = results
    strides = wanted_strides(x)
    assert fake.stride() == clipped.stride() == strides, (context, fake.stride())
    for packed in (scale, data) if x.dim() else ():
        want = dense_strides(packed.shape, order_in_memory(x))
        assert all(n == 1 or a == b for n, a, b in zip(packed.shape, packed.stride(), want, strict=True)), context
    assert again.stride() == (strides if x.dim() else (1,)), (context, data.shape, data.stride(), again.stride())
    for got, told in zip(
        results, all_operators(torch.empty_strided(x.shape, x.stride(), device="meta"), name, axis), strict=True
    ):
        assert (got.shape, got.stride(), got.dtype) == (told.shape, told.stride(), told.dtype), context


@pytest.mark.compiled
@pytest.mark.slow_except("fp6_e2m3")
@pytest.mark.parametrize("name", NAMES)
def test_every_order(name):
    for x in dense_tensors(1, 2, 3):
        for axis in range(x.dim()):
            check(x, name, axis)


def test_every_order_of_four_and_five_dimensions():
    shapes = ((2, 5, 1, 3), (1, 2, 5, 1), (2, 1, 2, 7), (3, 2, 5, 4), (2, 3, 1, 2, 5))
    names = itertools.cycle(NAMES)
    for shape in shapes:
        for i, order in enumerate(itertools.permutations(range(len(shape)))):
            for axis in range(len(shape)) if len(shape) < 5 else [i % 5]:
                check(laid_out(shape, order), next(names), axis)


@pytest.mark.slow_except("even")
@pytest.mark.parametrize("rounding", ["even", "stochastic"])
def test_views(rounding):
    for x in views():
        for axis in range(max(x.dim(), 1)):
            for name in NAMES:
                check(x, name, axis, rounding)
