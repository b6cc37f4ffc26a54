"""Make `torch.export.load` and `torch.export.save` do no part of their work again.

To load a program, torch (2.13) resolves types and parses sizes for each node. That was more than half of the time to
load a language model, whose graph has few types and few sizes. To save one it also computes a canonical form, a test
whose result it discards: a third of the time. A torch that caches types and sizes in `torch._export.serde.serialize`,
and saves without that form, needs no patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


def without_canonical_form() -> AbstractContextManager[None]:
    """Keep torch from computing the canonical form of a program that it saves within the context. One thread at a time
    saves: torch changes state of the process meanwhile."""
    return replaced(serialize, "canonicalize", lambda canonicalize: lambda program, *args: program)


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
