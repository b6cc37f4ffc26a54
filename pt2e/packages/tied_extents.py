"""Extents that depend on others without a guard of the export that says so.

A mask of fewer rows than its ids is refused by the program, at run time, and read past its end by compiled code. Which
extents are tied shows when the program is tried with one of them changed: it takes that one changed together with
others.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from pt2mx.pt2e.packages.trial import Trial

#: two symbols, of which the first must be at least the second
Tie = tuple[sympy.Symbol, sympy.Symbol]


def tied_extents(example: Mapping[sympy.Symbol, int], dims: Mapping[sympy.Symbol, int], agree: Trial) -> list[Tie]:
    """Return the ties among a program's symbols. Equal ones are tied in both directions.

    Args:
        example: the extents of the symbols in the example. Only symbols with the same extent there are tied.
        dims: the dimension of its input that each symbol is.
        agree: runs a trial.
    """
    ties: list[Tie] = []
    for extent in sorted(set(example.values())):
        alike = [symbol for symbol in example if example[symbol] == extent]
        if len(alike) == 1:
            continue
        # longer ones first: repeated values are valid ones, where an index may point at what was cut; others where a
        # program takes even ones only
        extents = (extent + 1, 2 * extent, extent - 1, extent // 2)
        changed = next((n for n in extents if n and agree(dict.fromkeys(alike, n))), None)
        if changed is None:
            continue
        for symbol in alike:
            others = [other for other in _together(symbol, alike, dims, changed, agree) if other != symbol]
            ties += [(other, symbol) if changed > extent else (symbol, other) for other in others]
    return ties


def _together(
    symbol: sympy.Symbol, alike: list[sympy.Symbol], dims: Mapping[sympy.Symbol, int], extent: int, agree: Trial
) -> list[sympy.Symbol]:
    """Return the smallest set found that holds `symbol` and that the program takes changed to `extent`; it takes
    `alike`."""

    def taken(some: list[sympy.Symbol]) -> bool:
        return agree(dict.fromkeys(some, extent)) is True

    pairs = [[symbol, other] for other in alike if other != symbol]
    of_one_dim = [other for other in alike if dims[other] == dims[symbol]]
    found = next((some for some in ([symbol], *pairs, of_one_dim) if taken(some)), alike)
    for other in found if len(found) > 2 else ():
        rest = [kept for kept in found if kept != other]
        if other != symbol and taken(rest):
            found = rest
    return found
