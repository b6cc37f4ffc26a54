"""Generate the code of a graph module once. torch.fx generates it after each change, and copying a graph is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.fx import GraphModule
from torch.fx.graph import PythonCode

T = TypeVar("T", bound=nn.Module)


class _Delayed(threading.local):
    """The graph modules of this thread whose code waits; None: no code waits."""

    modules: dict[int, GraphModule] | None = None


_delayed, _recompile = _Delayed(), GraphModule.recompile


@contextmanager
def recompile_once() -> Iterator[Callable[[T], T]]:
    """Delay `GraphModule.recompile` in this thread until the end of the context, or until the module is called.

    It yields a function that marks a result and returns it. At the end, results and modules that are older than the
    context get their code, once. Copies in between, which are neither, get none unless they are called.
    """
    before, results = _delayed.modules, list[nn.Module]()
    waiting = _delayed.modules = dict[int, GraphModule]()
    GraphModule.recompile = _delay  # type: ignore[assignment,method-assign]

    def mark(result: T) -> T:
        results.append(result)
        return result

    try:
        yield mark
    finally:
        _delayed.modules = before
        marked = {id(module) for result in results for module in result.modules()}
        for key, module in waiting.items():
            if key in marked or "_code" in vars(module):
                module.recompile()


def _delay(module: GraphModule) -> PythonCode | None:
    """Generate the code of a module when it is called, if this thread delays code; otherwise now."""
    if _delayed.modules is None or type(module).recompile is not _delay:
        return _recompile(module)
    _delayed.modules[id(module)] = module
    type(module).forward = _forward  # each graph module has a class of its own
    return None


def _forward(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
    _recompile(module)
    return module.forward(*args, **kwargs)
