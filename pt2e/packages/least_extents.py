"""The least extents that compiled code takes.

Tracing holds a dynamic extent to be at least 2, and exported programs do not check that bound: most take 0 and 1 as
well. Compiled code may have used it (`x[:2]` reads two rows). So both are run, and their outputs compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from torch.export import ExportedProgram

from pt2mx.pt2e.packages.extents import Range, size_in_conditions, symbols
from pt2mx.pt2e.packages.tied_extents import Tie, tied_extents
from pt2mx.pt2e.packages.trial import Call, trial


def least_extents(
    program: ExportedProgram, stated: Sequence[list[Range] | None], eager: Call, compiled: Call
) -> tuple[dict[sympy.Symbol, int], list[str]]:
    """Return the least extent of each of the program's symbols with which `compiled` gives what `eager` gives, and the
    conditions, in the form of `pt2mx.pt2e.packages.conditions`, that say which extents are tied.

    The least extent is 0 or 1 as far as the stated range allows, 1 also where that begins at 2, as tracing has it, and
    otherwise 2.

    Args:
        program: an exported program with example inputs; parts of them are the inputs of the trials.
        stated: the ranges of its inputs.
        eager: the program's module. It raises an error where the program does not take its inputs.
        compiled: called with the same inputs.
    """
    places = symbols(program)
    example = {symbol: place.extent for symbol, place in places.items()}
    agree = trial(program, eager, compiled)
    ties = tied_extents(example, {symbol: place.dim for symbol, place in places.items()}, agree)

    # an extent of 1 in the example is what the code was made for
    lowest = {symbol: extents[place.dim][0] for symbol, place in places.items() if (extents := stated[place.input])}
    least = {symbol: 2 for symbol, n in lowest.items() if n <= 2 and example[symbol] >= 2}
    for symbol in least:
        # what must not be longer has the same extent
        group = [symbol, *(shorter for longer, shorter in ties if longer == symbol)]
        if agree(dict.fromkeys(group, 1)):
            least[symbol] = 0 if lowest[symbol] == 0 and agree(dict.fromkeys(group, 0)) else 1
    # all of them at a time; a program that refuses that will do so
    if agree(least) is False:
        least = dict.fromkeys(least, 2)
    sizes = {symbol: size_in_conditions(place.input, place.dim) for symbol, place in places.items()}
    return least, _conditions(ties, sizes)


def _conditions(ties: list[Tie], sizes: dict[sympy.Symbol, str]) -> list[str]:
    """Return the conditions that ties set on the sizes that the symbols stand for."""
    order, conditions = list(sizes), []
    for longer, shorter in ties:
        if (shorter, longer) not in ties:
            conditions.append(f"{sizes[longer]} >= {sizes[shorter]}")
        elif order.index(longer) < order.index(shorter):
            conditions.append(f"{sizes[longer]} == {sizes[shorter]}")
    return conditions
