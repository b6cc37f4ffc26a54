import sympy
from torch.utils._sympy import solve as torch_solve

from pt2mx.patches.exact_lengths import exact_lengths


def test_lengths_behind_sizes_are_exact():
    """For each factor and offset, and torch's own function after that."""
    length, size = sympy.symbols("length size", integer=True)
    before = torch_solve.try_solve
    with exact_lengths():
        for factor in (1, 2, 3, 7, 10, 41, 49, 98, 103, 107, 161):
            for offset in (-3, 0, 1, 48):
                _, solved = torch_solve.try_solve(sympy.Eq(factor * length + offset, size), length)
                assert all(solved.subs(size, factor * n + offset) == n for n in (0, 1, 2, 6, 48, 49, 50, 10**6 + 1))
                assert not solved.has(sympy.Rational) or not solved.atoms(sympy.Rational) - solved.atoms(sympy.Integer)
    assert torch_solve.try_solve is before
