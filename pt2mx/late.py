"""Imports later than that of `pt2mx`: the parts that bring torchao, Dynamo or Inductor, which take seconds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader


def reach(package: ModuleType, names: Mapping[str, str] | None = None) -> None:
    """Import the modules of `package` when they are reached as its attributes, and so on in the packages among them. A
    `__getattr__` of its own goes on to serve other names.

    Args:
        names: name -> the module that defines it, for names of other modules that are attributes of `package` too.
    """
    elsewhere, own = names or {}, vars(package).get("__getattr__")

    def __getattr__(name: str) -> object:
        if name in elsewhere:
            value = getattr(importlib.import_module(elsewhere[name]), name)
        elif name.startswith("_") or not importlib.util.find_spec(f"{package.__name__}.{name}"):
            if own is not None:
                return own(name)
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        else:
            value = importlib.import_module(f"{package.__name__}.{name}")
            if hasattr(value, "__path__"):
                reach(value)
        setattr(package, name, value)
        return value

    vars(package)["__getattr__"] = __getattr__


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
    """A finder of the modules that are waited for: it finds them where the finders after it do, and has their loaders
    make the calls."""

    def __init__(self) -> None:
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

    def _call_after(self, loader: Loader, name: str) -> None:
        """Have a loader make the calls. It stays what it is: who reads a module's source asks it."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del vars(loader)["exec_module"]
            execute(module)
            for call in self.calls.pop(name, ()):
                call()

        vars(loader)["exec_module"] = exec_module


_finder = _Finder()
