"""Load an exported program as `torch.export.load` does, but faster.

For each node of a graph torch resolves the types of its schema and parses the sizes of tensors again. That was more
than half of the time to load a language model, whose graph has few types and few sizes. This module makes torch do it
once for each type and size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._export.serde import serialize
from torch.export import ExportedProgram

_lock = threading.Lock()


def deserialize(path: str | os.PathLike[str]) -> ExportedProgram:
    """Return `torch.export.load(path)`. Threads take turns."""
    deserializer = serialize.GraphModuleDeserializer
    with (
        _lock,
        _replaced(serialize, "typing", _Typing),
        _replaced(deserializer, "_parse_sym_expr", _parse_once),
    ):
        return torch.export.load(path)


@contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by `replacement(attribute)`, or do nothing if this version of torch lacks it."""
    if (before := vars(owner).get(name)) is None:
        yield
        return
    setattr(owner, name, replacement(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Typing:
    """The module `typing`, whose `get_type_hints` remembers its results."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._hints: dict[Any, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_type_hints(self, cls: Any, **names: Any) -> dict[str, Any]:
        if cls not in self._hints:
            self._hints[cls] = self._module.get_type_hints(cls, **names)
        return self._hints[cls]


def _parse_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that caches the results of `parse` for each `ShapeEnv`."""
    known = WeakKeyDictionary[Any, dict[Any, Any]]()

    def remember(self: Any, *args: Any, **names: Any) -> Any:
        results, key = known.setdefault(self.shape_env, {}), (args, tuple(names.items()))
        if key not in results:
            results[key] = parse(self, *args, **names)
        return results[key]

    return remember
