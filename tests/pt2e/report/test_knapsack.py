import itertools
import random

import pytest

from pt2mx.pt2e.report import suggest
from pt2mx.pt2e.report.suggest import Option, least_noise


def brute_force(items, limit):
    fits = [c for c in itertools.product(*items) if sum(o.bytes for o in c) <= limit]
    return min((sum(o.noise for o in c) for c in fits), default=None)


def total(items, chosen):
    picked = [options[i] for options, i in zip(items, chosen, strict=True)]
    return sum(o.bytes for o in picked), sum(o.noise for o in picked)


def random_items(generator, count, unit=1):
    return [
        [Option(unit * generator.randint(1, 40), generator.random()) for _ in range(generator.randint(1, 4))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_best_of_all_choices(seed):
    generator = random.Random(seed)
    items = random_items(generator, 5, unit=generator.choice([1, 96]))
    smallest = sum(min(o.bytes for o in options) for options in items)
    for limit in (smallest, smallest + 37, 2 * smallest, 100 * smallest):
        used, noise = total(items, least_noise(items, limit))
        assert used <= limit and noise == pytest.approx(brute_force(items, limit), rel=1e-12)
    assert least_noise(items, smallest - 1) is None


def test_a_fine_budget_is_kept_and_nearly_used(monkeypatch):
    monkeypatch.setattr(suggest, "_STEPS", 200)
    items = random_items(random.Random(1), 6, unit=997)
    items[0].append(Option(10_001, 0.0))
    limit = 50_000 + sum(min(o.bytes for o in options) for options in items)
    used, noise = total(items, least_noise(items, limit))
    assert used <= limit
    assert noise <= brute_force(items, limit - len(items) * (50_000 // 200 + 1)) + 1e-12


def test_costs_are_rounded_up_to_whole_steps(monkeypatch):
    monkeypatch.setattr(suggest, "_STEPS", 10)
    # of 100 bytes a step is 10, 19 bytes are two steps, and 21 three
    items = [[Option(0, 1.0), Option(size, 0.0)] for size in [19] * 9 + [21]]
    assert total(items, least_noise(items, 100)) == (5 * 19, 5.0)


def test_nothing_to_choose():
    assert least_noise([], 10) == []
    assert least_noise([[Option(3, 1.0)], [Option(4, 2.0)]], 7) == [0, 0]
