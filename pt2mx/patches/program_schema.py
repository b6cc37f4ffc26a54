"""Make `torch.export.load` and `torch.export.save` do no part of their work again.

To load a program, torch (2.13) looks at the type of each value in the JSON, parses the sizes of each node and makes
its fake tensor. That was two thirds of the time to load a language model, whose graph has few types and whose nodes
have few different sizes. To save one it also computes a canonical form, a test whose result it discards: a third of the
time. A torch that reads types, sizes and fake tensors once in `torch._export.serde.serialize`, and saves without that
form, needs no patch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._export.serde import schema, serialize
from torch._subclasses import FakeTensor

from pt2mx.patches.replaced import replaced


@contextmanager
def schema_read_once() -> Iterator[None]:
    """Look once at the types, sizes and equal values of the programs that are loaded within the context."""
    deserializer = serialize.GraphModuleDeserializer
    with (
        replaced(serialize, "_dict_to_dataclass", _Reader),
        replaced(deserializer, "_parse_sym_expr", _parse_once),
        replaced(deserializer, "deserialize_tensor_meta", _share_memory),
    ):
        yield


def without_canonical_form() -> AbstractContextManager[None]:
    """Keep torch from computing the canonical form of a program that it saves within the context. One thread at a time
    saves: torch changes state of the process meanwhile."""
    return replaced(serialize, "canonicalize", lambda canonicalize: lambda program, *args: program)


class _Reader:
    """Reads JSON into the dataclasses of the schema, as `_dict_to_dataclass` does. The descriptions of equal tensors
    become one object."""

    def __init__(self, _dict_to_dataclass: object) -> None:
        self._readers: dict[Any, Callable[[Any], Any]] = {}

    def __call__(self, kind: Any, data: Any) -> Any:
        """Return data as a type of the schema."""
        if kind not in self._readers:
            self._readers[kind] = self._reader(kind)
        return self._readers[kind](data)

    def _reader(self, kind: Any) -> Callable[[Any], Any]:
        arguments = typing.get_args(kind)
        if type(None) in arguments:
            return lambda data: None if data is None else self(arguments[0], data)
        if typing.get_origin(kind) is list:
            return lambda data: [self(arguments[0], value) for value in data]
        if typing.get_origin(kind) is dict:
            return lambda data: {key: self(arguments[1], value) for key, value in data.items()}
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind, globalns=vars(schema))
            make = kind.create if issubclass(kind, serialize._Union) else kind
            names = {field.name for field in dataclasses.fields(kind)}  # a newer torch may write others

            def read(data: Any) -> Any:
                return make(**{name: self(hints[name], value) for name, value in data.items() if name in names})

            return _once(read) if kind is schema.TensorMeta else read
        return float if kind is float else lambda data: data


def _once(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def remember(data: Any) -> Any:
        text = repr(data)
        if text not in known:
            known[text] = read(data)
        return known[text]

    return remember


def _parse_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that caches the results of `parse` for each `ShapeEnv`."""
    known = WeakKeyDictionary[Any, dict[Any, Any]]()

    def remember(self: Any, *args: Any, **names: Any) -> Any:
        results, key = known.setdefault(self.shape_env, {}), (args, tuple(names.items()))
        if key not in results:
            results[key] = parse(self, *args, **names)
        return results[key]

    return remember


def _share_memory(deserialize: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes the fake tensors of equal results from one tensor, because that of symbolic sizes
    takes long. Inputs have memory of their own: torch asks which of them share it."""
    known = WeakKeyDictionary[Any, dict[int, Callable[[], FakeTensor]]]()

    def make(self: Any, meta: Any) -> Any:
        last = next(iter(reversed(self.graph.nodes)), None)  # none yet, where example inputs are fake
        if last is None or last.op != "call_function":
            return deserialize(self, meta)
        makers = known.setdefault(self.shape_env, {})
        if id(meta) not in makers:
            sizes, strides = ([self.deserialize_sym_int(one) for one in of] for of in (meta.sizes, meta.strides))
            dtype = serialize.deserialize_scalar_type(meta.dtype)
            on_meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta", requires_grad=meta.requires_grad)
            device = serialize.deserialize_device(meta.device)
            makers[id(meta)] = partial(FakeTensor, self.fake_tensor_mode, on_meta, device)
        return makers[id(meta)]()

    return make
