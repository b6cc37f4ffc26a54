"""Replace functions of transformers, by name, while a program is traced.

Some functions of transformers assume a cache that is as long as the tokens read, or lengths that a trace would fix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pt2mx.pt2e.language import attention, recurrence

#: function or method in a module of transformers -> what takes its place, with the cache before its arguments
FUNCTIONS: dict[str, Callable[..., Any]] = {**attention.FUNCTIONS, **recurrence.FUNCTIONS}


@contextmanager
def with_functions(model: nn.Module, cache: Any) -> Iterator[None]:
    """Replace functions of transformers in the modules that a model comes from, for a call with this cache."""
    original: list[tuple[Any, str, Callable[..., Any]]] = []
    try:
        for module in {sys.modules[type(module).__module__] for module in model.modules()}:
            for path, function in FUNCTIONS.items():
                *parent, name = path.split(".")
                owner: Any = module
                for part in parent:
                    owner = getattr(owner, part, None)
                if hasattr(owner, name):
                    original.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, _before(cache, function))
        yield
    finally:
        for owner, name, replaced in original:
            setattr(owner, name, replaced)


def _before(cache: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, which can also be a method, that passes the cache before its arguments."""
    return lambda *args, **kwargs: function(cache, *args, **kwargs)
