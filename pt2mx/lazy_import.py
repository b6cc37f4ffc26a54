"""Lazy imports: torchao, Dynamo and Inductor take seconds to import, so load them on first use."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader


def stub_names(package_file: str) -> dict[str, str]:
    """Return the names that the stub of a package (`__init__.pyi`) exports, each with the module that defines it."""
    stub = ast.parse(Path(package_file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def attach_lazy(package: ModuleType, names: Mapping[str, str] | None = None) -> None:
    """Import the modules of `package` and its subpackages at their first use as attributes. The package's own
    `__getattr__` answers for other names.

    Args:
        names: name -> the module that defines it, for attributes of `package` that other modules define.
    """
    defined_in, fallback = names or {}, vars(package).get("__getattr__")

    def __getattr__(name: str) -> object:
        module = defined_in.get(name, package.__name__)
        if module != package.__name__:
            value = getattr(importlib.import_module(module), name)
        elif name.startswith("_") or not importlib.util.find_spec(f"{package.__name__}.{name}"):
            if fallback is not None:
                return fallback(name)
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        else:
            value = importlib.import_module(f"{package.__name__}.{name}")
            if hasattr(value, "__path__"):
                attach_lazy(value)
        setattr(package, name, value)
        return value

    vars(package)["__getattr__"] = __getattr__


def on_import(name: str, call: Callable[[], object]) -> None:
    """Call `call` as soon as the module `name` has been imported: now, where it has been."""
    if name in sys.modules:
        importlib.import_module(name)  # waits where another thread is still importing it
        call()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.calls.setdefault(name, []).append(call)


class _Finder:
    """Find a module where the finders after this one do, and have its loader make the calls that wait for it."""

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
        """Have a loader make the calls. Keep its type: tools that read a module's source ask for it."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del vars(loader)["exec_module"]
            execute(module)
            for call in self.calls.pop(name, ()):
                call()

        vars(loader)["exec_module"] = exec_module


_finder = _Finder()
