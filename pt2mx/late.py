"""What is imported later than `pt2mx`: the parts that bring torchao, Dynamo or Inductor, which take seconds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def reach(package: ModuleType, names: Mapping[str, str] | None = None) -> None:
    """Import the modules of `package` when they are reached as its attributes, and so on in the packages among them.

    Args:
        names: name -> the module that defines it, for names of other modules that are attributes of `package` too.
    """
    names = names or {}

    def __getattr__(name: str) -> object:
        if name in names:
            value = getattr(importlib.import_module(names[name]), name)
        elif name.startswith("_") or not importlib.util.find_spec(f"{package.__name__}.{name}"):
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        else:
            value = importlib.import_module(f"{package.__name__}.{name}")
            if hasattr(value, "__path__"):
                reach(value)
        setattr(package, name, value)
        return value

    package.__getattr__ = __getattr__


def when_imported(name: str, call: Callable[[], object]) -> None:
    """Call `call` as soon as the module `name` has been imported: now, where it has been."""
    if name in sys.modules:
        importlib.import_module(name)  # waits where another thread is still importing it
        call()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.calls.setdefault(name, []).append(call)


class _Finder:
    """Finds the modules that are waited for where the finders after it do, and has their loaders make the calls."""

    def __init__(self):
        self.calls: dict[str, list[Callable[[], object]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.calls:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader, name)
        return spec

    def _call_after(self, loader: object, name: str) -> None:
        """The loader stays what it is: who reads a module's source asks it."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            for call in self.calls.pop(name, ()):
                call()

        loader.exec_module = exec_module


_finder = _Finder()
