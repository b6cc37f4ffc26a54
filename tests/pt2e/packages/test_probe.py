"""Probes of compiled code: the smallest sizes of dimensions, and equal dimensions."""

import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim

from pt2mx import MXError
from pt2mx.pt2e.packages.probe import equal_dims, min_sizes, probe
from pt2mx.pt2e.program.sizes import ranges, symbols
from tests.models import Double


@pytest.mark.parametrize("size", [0, 1, 3, 5])
def test_values_are_cut_or_repeated_in_the_order_of_the_memory(size):
    x = torch.randn(4, 3, 5).transpose(0, 2)
    program = torch.export.export(Double(), (x,), dynamic_shapes=({1: Dim("n")},))
    seen = []

    def compiled(probed):
        seen.append(probed)
        return probed * 2

    (symbol,) = symbols(program)
    assert probe(program, program.module(), compiled)({symbol: size}) is True
    (probed,) = seen
    assert torch.equal(probed, torch.cat([x, x], 1)[:, :size])
    assert probed.permute(2, 1, 0).is_contiguous()


def test_sizes_that_the_program_takes_and_compiled_code_computes():
    program = torch.export.export(Double(), (torch.ones(4),), dynamic_shapes=({0: Dim("n", max=5)},))
    (symbol,) = symbols(program)
    matches = probe(program, program.module(), lambda x: x * 2 if len(x) > 2 else x)
    assert [matches({symbol: n}) for n in (2, 3, 5, 6, -1)] == [False, True, True, None, None]


class Model(nn.Module):
    def forward(self, x, y):
        return x * 2, y + 1


class Gather(nn.Module):
    """Takes as many rows of y as x has."""

    def forward(self, x, y):
        return x * y[torch.arange(x.shape[0])]


def same(x, y):
    return x * 2, y + 1


def two_rows(x, y):  # like code compiled for at least two rows
    return x * 2, torch.cat([y, y + 1])[:2] if len(y) < 2 else y + 1


def wrong_values(x, y):
    return x * (2 if len(x) > 1 else 3), y + 1


def crashes(x, y):
    return x * 2, (y + 1 if len(y) else 1 / 0)


def not_both_at_once(x, y):
    return (x * 2, y + 1) if len(x) > 1 or len(y) > 1 else (x, y)


def other_dtype(x, y):
    return x * 2, (y + 1).to(torch.float32 if len(y) > 1 else torch.bfloat16)


AUTO, NAMED, POSITIVE = Dim.AUTO, Dim("n"), Dim("n", min=1)


@pytest.mark.parametrize(
    ("dims", "compiled", "expected"),
    [
        ((AUTO, AUTO), same, [1, 1]),
        ((NAMED, AUTO), same, [0, 1]),
        ((POSITIVE, Dim("m", min=2)), same, [1, 1]),
        ((Dim("m", min=3), NAMED), same, [None, 0]),
        ((NAMED, Dim("m")), two_rows, [0, 2]),
        ((AUTO, AUTO), wrong_values, [2, 1]),
        ((NAMED, Dim("m")), crashes, [0, 1]),
        ((AUTO, AUTO), not_both_at_once, [2, 2]),
        ((AUTO, AUTO), other_dtype, [1, 2]),
        ((None, AUTO), two_rows, [2]),
    ],
)
def test_the_smallest_sizes_are_those_that_match(dims, compiled, expected):
    shapes = tuple(None if dim is None else {0: dim} for dim in dims)
    program = torch.export.export(Model(), (torch.randn(4, 3), torch.randn(5, 3)), dynamic_shapes=shapes)
    smallest, conditions = min_sizes(program, ranges(program), program.module(), compiled)
    assert list(smallest.values()) == [n for n in expected if n is not None] and conditions == []


def test_sizes_that_are_1_together():
    """The program accepts y of one row only with x of one row."""
    program = torch.export.export(
        Gather(), (torch.randn(4, 3), torch.randn(4, 3)), dynamic_shapes=({0: AUTO}, {0: AUTO})
    )
    smallest, conditions = min_sizes(program, ranges(program), program.module(), Gather())
    assert list(smallest.values()) == [1, 1]
    assert conditions == ["L['flat_args'][1].size()[0] >= L['flat_args'][0].size()[0]"]


def test_sizes_that_are_equal():
    class Both(Gather):
        def forward(self, x, y):
            return super().forward(x, y), super().forward(y, x)

    args, shapes = (torch.randn(4, 3), torch.randn(4, 3)), ({0: NAMED}, {0: Dim("m")})
    program = torch.export.export(Both(), args, dynamic_shapes=shapes)
    smallest, conditions = min_sizes(program, ranges(program), program.module(), Both())
    assert list(smallest.values()) == [0, 0]
    assert conditions == ["L['flat_args'][0].size()[0] == L['flat_args'][1].size()[0]"]


def test_derived_and_written_inputs_have_their_size():
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

    smallest, _ = min_sizes(program, ranges(program), program.module(), compiled)
    assert list(smallest.values()) == [1] and args[2].sum() == 0
    assert {(2, 1, 0.0), (14, 7, 0.0), (98, 49, 0.0)} <= set(seen) and all(x == 2 * y for x, y, _ in seen)


def test_static_programs_are_not_run():
    program = torch.export.export(Model(), (torch.randn(4, 3), torch.randn(1, 3)))
    assert min_sizes(program, ranges(program), None, None) == ({}, [])


A, B, C, D = sympy.symbols("a b c d")


def constraints(example, dims, takes):
    """Return the constraints and the number of probes; `takes` says which sizes the program takes."""
    probes = []

    def matches(changed):
        probes.append(changed)
        return True if takes(**{str(s): n for s, n in {**example, **changed}.items()}) else None

    return set(equal_dims(example, dims, matches)), len(probes)


@pytest.mark.parametrize(
    ("example", "takes", "expected"),
    [
        ({A: 4, B: 4}, lambda a, b: True, set()),
        ({A: 4, B: 4}, lambda a, b: a == b, {(A, B), (B, A)}),
        ({A: 4, B: 4}, lambda a, b: a >= b, {(A, B)}),
        ({A: 4, B: 4}, lambda a, b: a == b <= 4, {(A, B), (B, A)}),  # smaller ones only
        ({A: 4, B: 4}, lambda a, b: b <= a <= 4, {(A, B)}),
        ({A: 2, B: 2}, lambda a, b: a == b >= 2, {(A, B), (B, A)}),  # larger ones only
        ({A: 4, B: 4}, lambda a, b: a == b and a % 2 == 0, {(A, B), (B, A)}),  # even ones only
        ({A: 4, B: 4}, lambda a, b: a == b in (2, 4), {(A, B), (B, A)}),
        ({A: 4, B: 4}, lambda a, b: a == b == 4, set()),  # nothing else to compare with
        ({A: 4, B: 5}, lambda a, b: a < b, set()),
        ({A: 4, B: 4, C: 4}, lambda a, b, c: a == b == c, {(x, y) for x in (A, B, C) for y in (A, B, C) if x != y}),
        ({A: 4, B: 4, C: 4}, lambda a, b, c: a == c <= b, {(A, C), (C, A), (B, A), (B, C)}),
        ({A: 4, B: 4, C: 4}, lambda a, b, c: a == c, {(A, C), (C, A)}),
    ],
)
def test_constraints(example, takes, expected):
    assert constraints(example, dict.fromkeys(example, 0), takes)[0] == expected


def test_a_batch_as_large_as_the_length():
    """x: (a, b), mask: (c, d)."""
    example, dims = {A: 4, B: 4, C: 4, D: 4}, {A: 0, B: 1, C: 0, D: 1}
    both = {(A, C), (C, A), (B, D), (D, B)}
    assert constraints(example, dims, lambda a, b, c, d: a == c and b == d)[0] == both
    assert constraints(example, dims, lambda a, b, c, d: a <= c and b <= d)[0] == {(C, A), (D, B)}


def test_many_inputs_take_few_probes():
    symbols = sympy.symbols("s:24")
    example, dims = dict.fromkeys(symbols, 4), {s: i % 2 for i, s in enumerate(symbols)}
    pairs, probes = constraints(example, dims, lambda **n: all(n[f"s{i}"] == n[f"s{i % 2}"] for i in range(24)))
    assert pairs == {(x, y) for x in symbols for y in symbols if x != y and dims[x] == dims[y]} and probes < 1000


class Patches(nn.Module):
    """Takes patches of 7 by 7 positions one after the other."""

    def forward(self, x, scale):
        return x.view(-1, 49, 3).sum(1) * scale


def a_row_less(size):
    """Return code like torch's for a length of that size: it loses the last row."""
    return lambda x, scale: Patches()(x, scale)[: -1 if len(x) == 49 * size else None]


@pytest.mark.diagonal
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 12, 48, 49, 50, 90])
@pytest.mark.parametrize("factor", [1, 49])
def test_a_lost_row_is_found(size, factor):
    """At the lengths that lose one, and at the ends of a range; where the length itself is no size, too."""
    length = Dim("n", min=1, max=90)
    x = torch.randn(49 * 4, 3) if factor == 49 else torch.randn(4, 3)
    model = Patches() if factor == 49 else Model()
    args = (x, torch.randn(3)) if factor == 49 else (x, torch.randn(5, 3))
    program = torch.export.export(model, args, dynamic_shapes=({0: factor * length}, None))
    code = a_row_less(size) if factor == 49 else (lambda x, y: (x[: -1 if len(x) == size else None] * 2, y + 1))
    if size in (1, 12):  # such code takes lengths from 2; not probed
        smallest, _ = min_sizes(program, ranges(program), program.module(), code)
        assert list(smallest.values()) == ([] if factor == 49 else [2 if size == 1 else 1])
        return
    with pytest.raises(MXError, match="gives other outputs than the program for inputs of the sizes"):
        min_sizes(program, ranges(program), program.module(), code)


def test_large_inputs_are_not_probed():
    sizes = []
    program = torch.export.export(Double(), (torch.ones(2, 2**15),), dynamic_shapes=({0: Dim("n", max=500)},))
    min_sizes(program, ranges(program), program.module(), lambda x: sizes.append(len(x)) or x * 2)
    assert max(sizes) <= 8
