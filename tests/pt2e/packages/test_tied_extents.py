import pytest
import sympy

from pt2mx.pt2e.packages.tied_extents import tied_extents

A, B, C, D = sympy.symbols("a b c d")


def ties(example, dims, takes):
    """The ties that are found, and of how many trials; `takes` says which extents are taken."""
    tried = []

    def agree(changed):
        tried.append(changed)
        return True if takes(**{str(s): n for s, n in {**example, **changed}.items()}) else None

    return set(tied_extents(example, dims, agree)), len(tried)


@pytest.mark.parametrize(
    ("example", "takes", "want"),
    [
        ({A: 4, B: 4}, lambda a, b: True, set()),
        ({A: 4, B: 4}, lambda a, b: a == b, {(A, B), (B, A)}),
        ({A: 4, B: 4}, lambda a, b: a >= b, {(A, B)}),
        ({A: 4, B: 4}, lambda a, b: a == b <= 4, {(A, B), (B, A)}),  # shorter ones only
        ({A: 4, B: 4}, lambda a, b: b <= a <= 4, {(A, B)}),
        ({A: 2, B: 2}, lambda a, b: a == b >= 2, {(A, B), (B, A)}),  # longer ones only
        ({A: 4, B: 4}, lambda a, b: a == b and a % 2 == 0, {(A, B), (B, A)}),  # even ones only
        ({A: 4, B: 4}, lambda a, b: a == b in (2, 4), {(A, B), (B, A)}),
        ({A: 4, B: 4}, lambda a, b: a == b == 4, set()),  # nothing else to compare with
        ({A: 4, B: 5}, lambda a, b: a < b, set()),
        ({A: 4, B: 4, C: 4}, lambda a, b, c: a == b == c, {(x, y) for x in (A, B, C) for y in (A, B, C) if x != y}),
        ({A: 4, B: 4, C: 4}, lambda a, b, c: a == c <= b, {(A, C), (C, A), (B, A), (B, C)}),
        ({A: 4, B: 4, C: 4}, lambda a, b, c: a == c, {(A, C), (C, A)}),
    ],
)
def test_ties(example, takes, want):
    assert ties(example, dict.fromkeys(example, 0), takes)[0] == want


def test_a_batch_as_large_as_the_length():
    """x: (a, b), mask: (c, d)."""
    example, dims = {A: 4, B: 4, C: 4, D: 4}, {A: 0, B: 1, C: 0, D: 1}
    both = {(A, C), (C, A), (B, D), (D, B)}
    assert ties(example, dims, lambda a, b, c, d: a == c and b == d)[0] == both
    assert ties(example, dims, lambda a, b, c, d: a <= c and b <= d)[0] == {(C, A), (D, B)}


def test_many_inputs_take_few_trials():
    symbols = sympy.symbols("s:24")
    example, dims = dict.fromkeys(symbols, 4), {s: i % 2 for i, s in enumerate(symbols)}
    found, trials = ties(example, dims, lambda **n: all(n[f"s{i}"] == n[f"s{i % 2}"] for i in range(24)))
    assert found == {(x, y) for x in symbols for y in symbols if x != y and dims[x] == dims[y]} and trials < 1000
