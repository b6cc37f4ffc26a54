"""Extents that depend on others without a guard of the export that says so.

A mask of fewer rows than its ids is refused by the program, at run time, and read past its end by compiled code. Which
extents are tied shows where the program is tried with one of them changed: it takes it changed together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy

from pt2mx.pt2e.packages.trial import Trial

#: two symbols, of which the first must be at least the second
Tie = tuple[sympy.Symbol, sympy.Symbol]


def tied_extents(example: Mapping[sympy.Symbol, int], dims: Mapping[sympy.Symbol, int], agree: Trial) -> list[Tie]:
    """The ties among a program's symbols. Those that are equal are tied in both directions.

    Args:
        example: the extents of the symbols in the example. Only symbols that have the same there are tied.
        dims: which dimension of its input each symbol is.
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
        for symbol in alike if changed is not None else ():
            found = _together(symbol, alike, dims, lambda some, n=changed: agree(dict.fromkeys(some, n)) is True)
            others = [other for other in found if other != symbol]
            ties += [(other, symbol) if changed > extent else (symbol, other) for other in others]
    return ties


def _together(
    symbol: sympy.Symbol, alike: list[sympy.Symbol], dims: Mapping[sympy.Symbol, int], taken: Callable[[list], bool]
) -> list[sympy.Symbol]:
    """The least set that holds `symbol` and is taken; `alike` is."""
    pairs = [[symbol, other] for other in alike if other != symbol]
    of_one_dim = [other for other in alike if dims[other] == dims[symbol]]
    found = next((some for some in ([symbol], *pairs, of_one_dim) if taken(some)), alike)
    for other in found if len(found) > 2 else ():
        rest = [kept for kept in found if kept != other]
        if other != symbol and taken(rest):
            found = rest
    return found
