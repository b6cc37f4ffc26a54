"""Generate the code of a graph module once. torch.fx generates it after each change, and copying a graph is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import PythonCode

T = TypeVar("T", bound=nn.Module)
#: attributes that `GraphModule.recompile` sets
_GENERATED = {"_code", "_in_spec", "_out_spec", "_lineno_map", "_prologue_start"}


class _Delayed(threading.local):
    """The graph modules of this thread whose code waits, and whether each had code before; None: no code waits."""

    modules: WeakKeyDictionary[GraphModule, bool] | None = None


_delayed, _recompile = _Delayed(), GraphModule.recompile
_lock = threading.Lock()
_replacing = 0  # how many contexts, of all threads, need `_delay` in place of `GraphModule.recompile`


@contextmanager
def recompile_once() -> Iterator[Callable[[T], T]]:
    """Delay `GraphModule.recompile` in this thread until the end of the context, or until the code is used.

    It yields a function that marks a result and returns it. At the end, results and modules that are older than the
    context get their code, once. Copies in between, which are neither, get none unless somebody uses it. After the
    last context of all threads `GraphModule.recompile` is torch's again.
    """
    before, results = _delayed.modules, list[nn.Module]()

    def mark(result: T) -> T:
        results.append(result)
        return result

    with _replaced_recompile():
        waiting = _delayed.modules = WeakKeyDictionary[GraphModule, bool]()
        try:
            yield mark
        finally:
            _delayed.modules = before
            marked = {module for result in results for module in result.modules()}
            for module, had_code in list(waiting.items()):
                if had_code or module in marked:
                    module.recompile()


@contextmanager
def _replaced_recompile() -> Iterator[None]:
    """Replace `GraphModule.recompile` until the last of these contexts ends, in whichever thread."""
    global _replacing
    with _lock:
        _replacing += 1
        GraphModule.recompile = _delay  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        with _lock:
            _replacing -= 1
            if not _replacing:
                GraphModule.recompile = _recompile  # type: ignore[method-assign]


def module_of(program: ExportedProgram, check_guards: bool = True) -> GraphModule:
    """Return `program.module(check_guards)`, which generates the code of three copies by itself, with its code once."""
    with recompile_once() as mark:
        return mark(program.module(check_guards))


def _delay(module: GraphModule) -> PythonCode | _Waiting:
    """Generate the code of a module when it is used, if this thread delays code; otherwise now."""
    cls = type(module)  # each graph module has a class of its own
    if _delayed.modules is None or cls.recompile is not _delay:
        return _generate(module)
    _delayed.modules.setdefault(module, "_code" in vars(module))
    for name in _GENERATED & vars(module).keys():
        delattr(module, name)
    cls.forward, cls.__getattr__ = _Forward(module), _generated  # type: ignore[assignment,method-assign]
    cls.__reduce__ = _reduced  # type: ignore[assignment,method-assign]
    return _Waiting(module)


class _Waiting:
    """The code of a module, generated when an attribute is read: `GraphModule.__reduce__` reads that of `recompile`."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(_generate(self._module), name)


class _Forward:
    """`forward` of a class of modules whose code waits: a look at it, such as at its signature, generates the code."""

    def __init__(self, module: GraphModule) -> None:
        self._module = ref(module)  # a class of one module

    def __get__(self, instance: GraphModule | None, cls: type) -> Any:
        module = self._module()
        if module is None:
            return self
        _generate(module)
        looked_at: Any = cls if instance is None else instance
        return looked_at.forward


def _generate(module: GraphModule) -> PythonCode:
    """Generate the code of a module now.

    Raises:
        RuntimeError: for an AttributeError, of which a lookup that generates code would only say that `forward`, or
            another attribute, is missing.
    """
    try:
        code = _recompile(module)
    except AttributeError as error:
        raise RuntimeError(f"cannot generate the code of the graph: {error}") from error
    if vars(type(module)).get("__getattr__") is _generated:
        del type(module).__getattr__, type(module).__reduce__
    return code


def _generated(module: GraphModule, name: str) -> Any:
    """Return an attribute that a module lacks: `__getattr__` of a module whose code waits."""
    if name not in _GENERATED:
        return super(type(module), module).__getattr__(name)
    _generate(module)
    return getattr(module, name)


def _reduced(module: GraphModule) -> tuple[Any, ...]:
    """Pickle a module whose code waits: torch pickles the code."""
    _generate(module)
    return module.__reduce__()
