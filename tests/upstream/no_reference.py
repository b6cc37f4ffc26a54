"""A plugin of pytest: block-scaled matmuls are those of torch, without the reference of `tests/scaled_mm.py`."""

import contextlib

from tests import scaled_mm


def pytest_configure() -> None:
    scaled_mm.ScaledMM = contextlib.nullcontext
