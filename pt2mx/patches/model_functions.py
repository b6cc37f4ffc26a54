"""Replace functions of the modules that define a model of transformers, while a program is traced.

Some of them assume a cache that is as long as the tokens read, or lengths that a trace would fix, and a model has no
setting for them. A transformers that exports those models with caches of any length needs no patch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from pt2mx.patches.replaced import replaced


@contextmanager
def model_functions(model: nn.Module, functions: Mapping[str, Callable[..., Any]], cache: Any) -> Iterator[None]:
    """Replace functions and methods, by name, in the modules that a model comes from. `cache` is passed before the
    arguments of each."""
    with ExitStack() as stack:
        for module in {sys.modules[type(module).__module__] for module in model.modules()}:
            for path, function in functions.items():
                *parent, name = path.split(".")
                owner: Any = module
                for part in parent:
                    owner = getattr(owner, part, None)
                if hasattr(owner, name):
                    stack.enter_context(replaced(owner, name, partial(_with_cache, function, cache)))
        yield


def _with_cache(function: Callable[..., Any], cache: Any, replaced_one: object) -> Callable[..., Any]:
    """Return a function, which can also be a method, that passes the cache before its arguments."""
    return lambda *args, **kwargs: function(cache, *args, **kwargs)
