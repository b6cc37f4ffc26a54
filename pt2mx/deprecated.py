"""The public names of older versions: one table of renamed modules, names and arguments.

A renamed name still works, and warns with the new one. Add a row for each public name that changes, and for each class
whose objects users pickle: a pickle names the module and the class.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ParamSpec, TypeVar

from pt2mx.lazy_import import on_import

P = ParamSpec("P")
R = TypeVar("R")

#: old module or package -> new one, with its submodules: `pt2mx.pt2e.old`
MODULES: dict[str, str] = {
    "pt2mx.pt2e.collector": "pt2mx.pt2e.observe.observer",
    "pt2mx.pt2e.contents": "pt2mx.pt2e.inspect",
    "pt2mx.pt2e.contents.contents": "pt2mx.pt2e.inspect.inspect_file",
    "pt2mx.pt2e.debug.comparison": "pt2mx.pt2e.debug.errors",
    "pt2mx.pt2e.debug.differences": "pt2mx.pt2e.debug.errors",
    "pt2mx.pt2e.inspect.text": "pt2mx.pt2e.inspect.schema",
    "pt2mx.pt2e.language.perplexity": "pt2mx.pt2e.language.texts",
    "pt2mx.pt2e.onnx.bodies": "pt2mx.pt2e.onnx.function_bodies",
    "pt2mx.pt2e.onnx.float_report": "pt2mx.pt2e.onnx.quantize.quantize_onnx",
    "pt2mx.pt2e.optimize.hessian_observer": "pt2mx.pt2e.optimize.observers",
    "pt2mx.pt2e.optimize.index_observer": "pt2mx.pt2e.optimize.observers",
    "pt2mx.pt2e.origin": "pt2mx.pt2e.program.provenance",
    "pt2mx.pt2e.report.fidelity": "pt2mx.analysis.agreement",
    "pt2mx.pt2e.report.finite": "pt2mx.pt2e.flow.weights",
    "pt2mx.pt2e.sensitivity.recipe_comparison": "pt2mx.pt2e.report.results",
    "pt2mx.pt2e.sensitivity.result": "pt2mx.pt2e.report.results",
    "pt2mx.pt2e.stored_bits": "pt2mx.pt2e.flow.packed_weights",
    "pt2mx.quark.enums": "pt2mx.quark.attributes",
    "pt2mx.quark.library": "pt2mx.quark.model_quantizer",
}

#: old name in a module -> new one: `pt2mx:old_function`, `pt2mx.pt2e.module:OldClass`
NAMES: dict[str, str] = {
    "pt2mx:origin_of": "pt2mx:provenance_of",
    "pt2mx.pt2e.origin:Origin": "pt2mx.pt2e.program.provenance:Provenance",
    "pt2mx.pt2e.origin:origin_of": "pt2mx.pt2e.program.provenance:provenance_of",
    "pt2mx.pt2e.contents.contents:contents_of": "pt2mx.pt2e.inspect.inspect_file:inspect_file",
    "pt2mx.pt2e.debug.bisect:Piece": "pt2mx.pt2e.debug.bisect:Subgraph",
    "pt2mx.pt2e.debug.comparison:Compared": "pt2mx.pt2e.debug.errors:OperatorErrors",
    "pt2mx.pt2e.debug.differences:Difference": "pt2mx.pt2e.debug.errors:ErrorSums",
}

#: function -> old keyword argument -> new one; `renamed_arguments` decorates the function
ARGUMENTS: dict[str, dict[str, str]] = {}


def install() -> None:
    """Make the old names work."""
    sys.meta_path.insert(0, _RenamedModules())
    renamed: dict[str, dict[str, str]] = {}
    for old, new in NAMES.items():
        module, _, name = old.partition(":")
        renamed.setdefault(_renamed_module(module) or module, {})[name] = new
    for module, names in renamed.items():
        on_import(module, functools.partial(_attach, module, names))


def renamed_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Accept the old keyword arguments of a function in `ARGUMENTS` too."""
    renamed = ARGUMENTS[function.__qualname__]

    @functools.wraps(function)
    def accepts_old(*args: P.args, **kwargs: P.kwargs) -> R:
        for old in renamed.keys() & kwargs.keys():
            new = renamed[old]
            if new in kwargs:
                raise TypeError(f"{function.__name__}() got {new!r} and {old!r}, its old name")
            _warn(f"argument {old!r} of {function.__name__}", repr(new))
            kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return accepts_old


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated: use {new}", FutureWarning, stacklevel=3)


def _renamed_module(name: str) -> str | None:
    """Return the new name of a module: by its own row, or by the row of a package around it."""
    package, tail = name, ""
    while package:
        if package in MODULES:
            return MODULES[package] + tail
        package, dot, last = package.rpartition(".")
        tail = dot + last + tail
    return None


class _RenamedModules(MetaPathFinder, Loader):
    """Import a renamed module by its old name: both names are one module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if _renamed_module(name) else None

    def exec_module(self, module: ModuleType) -> None:
        new = _renamed_module(module.__name__)
        assert new is not None
        _warn(module.__name__, new)
        sys.modules[module.__name__] = importlib.import_module(new)


def _attach(module_name: str, renamed: Mapping[str, str]) -> None:
    """Give a module a `__getattr__` that resolves its old names."""
    module = sys.modules[module_name]
    other = vars(module).get("__getattr__")

    def __getattr__(name: str) -> object:
        if name in renamed:
            new_module, _, new_name = renamed[name].partition(":")
            # `from package import name` asks whether there is a name before it gets the name
            if sys._getframe(1).f_code.co_name != "_handle_fromlist":
                _warn(f"{module_name}.{name}", f"{new_module}.{new_name}")
            return getattr(importlib.import_module(new_module), new_name)
        if other is not None:
            return other(name)
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = __getattr__
