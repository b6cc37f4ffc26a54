import pytest
import torch
from torch import nn
from torch.export import Dim

from pt2mx.pt2e.packages.extents import ranges
from pt2mx.pt2e.packages.least_extents import least_extents


class Model(nn.Module):
    def forward(self, x, y):
        return x * 2, y + 1


class Gather(nn.Module):
    """Takes as many rows of y as x has."""

    def forward(self, x, y):
        return x * y[torch.arange(x.shape[0])]


def same(x, y):
    return x * 2, y + 1


def two_rows(x, y):  # as code does that was made for at least two
    return x * 2, torch.cat([y, y + 1])[:2] if len(y) < 2 else y + 1


def wrong_values(x, y):
    return x * (2 if len(x) > 1 else 3), y + 1


def crashes(x, y):
    return x * 2, (y + 1 if len(y) else 1 / 0)


def nothing_at_a_time(x, y):
    return (x * 2, y + 1) if len(x) > 1 or len(y) > 1 else (x, y)


def other_dtype(x, y):
    return x * 2, (y + 1).to(torch.float32 if len(y) > 1 else torch.bfloat16)


AUTO, NAMED, POSITIVE = Dim.AUTO, Dim("n"), Dim("n", min=1)


@pytest.mark.parametrize(
    ("dims", "compiled", "want"),
    [
        ((AUTO, AUTO), same, [1, 1]),
        ((NAMED, AUTO), same, [0, 1]),
        ((POSITIVE, Dim("m", min=2)), same, [1, 1]),
        ((Dim("m", min=3), NAMED), same, [None, 0]),
        ((NAMED, Dim("m")), two_rows, [0, 2]),
        ((AUTO, AUTO), wrong_values, [2, 1]),
        ((NAMED, Dim("m")), crashes, [0, 1]),
        ((AUTO, AUTO), nothing_at_a_time, [2, 2]),
        ((AUTO, AUTO), other_dtype, [1, 2]),
        ((None, AUTO), two_rows, [2]),
    ],
)
def test_the_least_extents_are_those_that_agree(dims, compiled, want):
    shapes = tuple(None if dim is None else {0: dim} for dim in dims)
    program = torch.export.export(Model(), (torch.randn(4, 3), torch.randn(5, 3)), dynamic_shapes=shapes)
    least, conditions = least_extents(program, ranges(program), program.module(), compiled)
    assert list(least.values()) == [n for n in want if n is not None] and conditions == []


def test_extents_that_are_1_together():
    """y of one row is taken with x of one row only."""
    program = torch.export.export(
        Gather(), (torch.randn(4, 3), torch.randn(4, 3)), dynamic_shapes=({0: AUTO}, {0: AUTO})
    )
    least, conditions = least_extents(program, ranges(program), program.module(), Gather())
    assert list(least.values()) == [1, 1]
    assert conditions == ["L['flat_args'][1].size()[0] >= L['flat_args'][0].size()[0]"]


def test_extents_that_are_equal():
    class Both(Gather):
        def forward(self, x, y):
            return super().forward(x, y), super().forward(y, x)

    args, shapes = (torch.randn(4, 3), torch.randn(4, 3)), ({0: NAMED}, {0: Dim("m")})
    program = torch.export.export(Both(), args, dynamic_shapes=shapes)
    least, conditions = least_extents(program, ranges(program), program.module(), Both())
    assert list(least.values()) == [0, 0]
    assert conditions == ["L['flat_args'][0].size()[0] == L['flat_args'][1].size()[0]"]


def test_what_is_derived_or_written_has_its_size():
    class Derived(nn.Module):
        def forward(self, x, y, state):
            state.add_(1)
            return x.reshape(y.shape[0], 2, 3).sum(1) + y + state

    n = Dim("n", min=1)
    args = torch.randn(8, 3), torch.randn(4, 3), torch.zeros(3)
    program = torch.export.export(Derived(), args, dynamic_shapes=({0: 2 * n}, {0: n}, None))
    seen = []

    def compiled(x, y, state):
        seen.append((len(x), len(y), state.sum().item()))
        state.add_(1)
        return x.reshape(y.shape[0], 2, 3).sum(1) + y + state

    least, _ = least_extents(program, ranges(program), program.module(), compiled)
    assert list(least.values()) == [1] and set(seen) == {(2, 1, 0.0)} and args[2].sum() == 0


def test_static_programs_are_not_run():
    program = torch.export.export(Model(), (torch.randn(4, 3), torch.randn(1, 3)))
    assert least_extents(program, ranges(program), None, None) == ({}, [])
