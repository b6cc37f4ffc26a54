"""The multiple-choice knapsack: one option per item, with the least total noise within a budget of bytes.

Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems" (2004), chapter 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: most steps into which a budget is divided
_STEPS = 1 << 16


@dataclass(frozen=True)
class Option:
    """The bytes of an item in one format, and its noise (finite)."""

    bytes: int
    noise: float


def least_noise(items: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Return the index of one option per item, with the least total noise and at most `budget` bytes.

    Return None if even the smallest options take more.

    Dynamic programming over the bytes beyond the total of the smallest options, in units of their greatest common
    divisor, so that the result is exact. If that makes more than 65,536 steps, larger units are used and costs are
    rounded up to them: the budget is respected, and at most a 65,536th of it per item is unused.
    """
    floors = [min(option.bytes for option in options) for options in items]
    spare = budget - sum(floors)
    if spare < 0:
        return None
    extras = [[option.bytes - floor for option in options] for options, floor in zip(items, floors, strict=True)]
    spare = min(spare, sum(map(max, extras)))
    unit = max(math.gcd(*(extra for row in extras for extra in row)), -(-spare // _STEPS), 1)
    steps = spare // unit
    least = np.zeros(steps + 1)  # least noise of the items so far, for each budget
    choices = []
    for options, row in zip(items, extras, strict=True):
        totals = np.full((len(options), steps + 1), np.inf)
        costs = [-(-extra // unit) for extra in row]
        for total, option, cost in zip(totals, options, costs, strict=True):
            if cost <= steps:
                total[cost:] = least[: steps + 1 - cost] + option.noise
        choices.append((totals.argmin(0).astype(np.int16), costs))
        least = totals.min(0)
    chosen, left = [], steps
    for best, costs in reversed(choices):
        chosen.append(int(best[left]))
        left -= costs[chosen[-1]]
    return chosen[::-1]
