"""Calls on several numbers of threads."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def on_threads(call: Callable[[], T], *counts: int) -> list[T]:
    """Return what a call returns on each number of threads of torch. After that torch has as many as before."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(threads)
    return results
