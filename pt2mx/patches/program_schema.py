"""Make `torch.export.load` resolve each type and parse each size once.

torch (2.13) does both again for each node. That was more than half of the time to load a language model, whose graph
has few types and few sizes. A torch that caches them in `torch._export.serde.serialize` needs no patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch._export.serde import serialize

from pt2mx.patches.replaced import replaced


@contextmanager
def schema_read_once() -> Iterator[None]:
    """Cache the types and sizes of the programs that are loaded within the context."""
    with (
        replaced(serialize, "typing", _Typing),
        replaced(serialize.GraphModuleDeserializer, "_parse_sym_expr", _parse_once),
    ):
        yield


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
