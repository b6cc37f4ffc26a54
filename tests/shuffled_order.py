"""A plugin of pytest: modules in a random order, and the tests of each, by the seed in the variable SEED.

SEED=1 python -m pytest -p tests.shuffled_order
"""

import os
import random


def pytest_report_header():
    """Return the line that says how to repeat the order."""
    return f"order: SEED={_seed()}"


def pytest_collection_modifyitems(items):
    """Shuffle the tests; what a module shares is still made once."""
    order = random.Random(_seed())
    modules = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    shuffled = list(modules.values())
    order.shuffle(shuffled)
    for tests in shuffled:
        order.shuffle(tests)
    items[:] = [item for tests in shuffled for item in tests]


def _seed():
    return os.environ.get("SEED", "0")
