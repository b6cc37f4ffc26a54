"""RoPE and the write of the cache in a decoder's step: one operator instead of a kernel for each tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    Quantize,
    RotateQuantizeAndStore,
    args_of,
    insert_call,
    named_args,
    node_arg,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.decoding import decoding_attention, decoding_attention_mx
from pt2mx.ops.rope import RotateAndStore
from pt2mx.spec import MXSpec

aten = torch.ops.aten

#: operators that return the values of their argument
_SAME = (aten.alias.default, aten.contiguous.default, aten.clone.default)


class _Rotated(NamedTuple):
    """x * cos + y * sin, where y has the halves of x in the other order, and the second negated."""

    x: Node
    cos: Node
    sin: Node


class _Written(NamedTuple):
    """A cache that a node returns after it has written new values into some slots."""

    write: Node
    cache: Node
    slots: Node
    new: Node


class _New(NamedTuple):
    """The new keys and values before they are quantized, and how they are quantized."""

    key: Node
    value: Node
    specs: tuple[MXSpec, ...]


class _Cache(NamedTuple):
    """The cache of an attention: its arguments of the call, the operator that writes it, and what it writes."""

    arguments: tuple[str, ...]
    writer: type[RotateAndStore[Any]] | type[RotateQuantizeAndStore]
    new_rows: Callable[[Sequence[_Written]], _New | None]


@graph_pass((decoding_attention, decoding_attention_mx, attention_mx))
def fuse_rope(model: GraphModule) -> None:
    """Replace the rotation of queries and keys before attention over a cache, and the writes of the cache, by
    `rotate_and_store`; over a cache of codes also the quantization, by `rotate_quantize_and_store`.

    The pass skips rotations of other forms or of a part of a head, and caches that anything else reads or writes.
    """
    for target, cache in _CACHES.items():
        for node in model.graph.find_nodes(op="call_function", target=target):
            _fuse(node, cache)


def _fuse(node: Node, cache: _Cache) -> None:
    call = named_args(node)
    writes = [written for name in cache.arguments if (written := _written(call[name])) is not None]
    new = cache.new_rows(writes) if len(writes) == len(cache.arguments) else None
    query, key = _rotated(call["query"]), None if new is None else _rotated(new.key)
    if query is None or key is None or new is None or not _agree(query, key, writes):
        return
    tensors = query.x, key.x, new.value, *(one.cache for one in writes), writes[0].slots, query.cos, query.sin
    writer: Any = cache.writer
    try:
        writer(*map(value_of, tensors), *new.specs).check()
    except MXError:
        return
    rotated = insert_call(node, writer(*tensors, *new.specs))
    reads = [call["query"], *(call[name] for name in cache.arguments)]
    for read, replacement in zip(reads, (rotated, *(one.cache for one in writes)), strict=True):
        node.replace_input_with(read, replacement)
        erase_unused(read)
    for written in writes:
        if written.write in node.graph.nodes:  # it has an effect, so `erase_unused` keeps it
            node.graph.erase_node(written.write)
        erase_unused(written.new)


def _agree(query: _Rotated, key: _Rotated, writes: Sequence[_Written]) -> bool:
    """Return whether queries and keys have the same factors, the writes the same slots and a tensor each, and nothing
    else reads or writes these."""
    if len({one.cache for one in writes}) < len(writes):
        return False
    alone = all(_is_alone(node) for written in writes for node in (written.cache, written.write))
    if not alone or query.cos is query.sin or any(written.slots is not writes[0].slots for written in writes):
        return False
    factors = [(query.cos, key.cos), (query.sin, key.sin)]
    return all(_source(one) is _source(other) and shape_of(one) == shape_of(other) for one, other in factors)


def _is_alone(node: Node) -> bool:
    """Return whether one node alone reads values, directly or through nodes that return the same."""
    users = [user for user in node.users if user.target is not aten.sym_size.int]
    return len(users) == 1 and (users[0].target not in _SAME or _is_alone(users[0]))


def _source(node: Node) -> Node:
    """Return the node whose dimensions `unsqueeze` counts anew."""
    return _source(node_arg(node)) if node.target is aten.unsqueeze.default else node


def _same(node: Node) -> Node:
    return _same(node_arg(node)) if node.target in _SAME else node


def _written(node: Node) -> _Written | None:
    write = _same(node)
    if write.target is not aten.index_copy_.default or args_of(write)[1] != 2:
        return None
    cache, _, slots, new = args_of(write)
    return _Written(write, cache, slots, _same(new)) if cache.op == "placeholder" else None


def _rotated(node: Node) -> _Rotated | None:
    terms = node.all_input_nodes if node.target is aten.add.Tensor and not node.kwargs else []
    if len(terms) != 2 or any(term.target is not aten.mul.Tensor for term in terms):
        return None
    for plain, turned in (terms, terms[::-1]):
        (y, sin), (x, cos) = turned.args, plain.args
        if (half := _turned(y)) is not None and half is x and isinstance(cos, Node) and isinstance(sin, Node):
            return _Rotated(half, cos, sin)
    return None


def _turned(node: object) -> Node | None:
    """Return x of `cat([-x[..., n / 2:], x[..., :n / 2]], -1)`."""
    if not isinstance(node, Node) or node.target is not aten.cat.default or len(args_of(node)[0]) != 2:
        return None
    (negated, first), dim = args_of(node)[0], args_of(node)[1:]
    if negated.target is not aten.neg.default or first.target is not aten.slice.Tensor:
        return None
    second, x = node_arg(negated), node_arg(first)
    if second.target is not aten.slice.Tensor or node_arg(second) is not x:
        return None
    width, last = (shape_of(x) or (0,))[-1], len(shape_of(x) or ()) - 1
    if (
        not isinstance(width, int)
        or dim not in ((-1,), (last,))
        or args_of(first)[1:] not in [(d, 0, width // 2) for d in (-1, last)]
    ):
        return None
    is_second = args_of(second)[1] in (-1, last) and args_of(second)[2] == width // 2
    return x if is_second else None


def _in_bfloat16(writes: Sequence[_Written]) -> _New:
    keys, values = writes
    return _New(keys.new, values.new, ())


def _in_codes(writes: Sequence[_Written]) -> _New | None:
    """Return what was quantized to the codes and scales that are written; None for keys and values of two formats, and
    for blocks that are not along the last dimension."""
    key, value = _quantized(*writes[:2]), _quantized(*writes[2:])
    if key is None or value is None or key.replace(x=value.x) != value:
        return None
    spec = key.spec
    fits = spec.axis % 4 == 3 and spec.block_rows == 1 and key.tensor_scale is None
    return _New(_same(key.x), _same(value.x), (spec,)) if fits else None


def _quantized(data: _Written, scale: _Written) -> Quantize | None:
    """Return the call whose two results are written as codes and as scales."""
    items = [node.args for node in (scale.new, data.new) if node.target is operator.getitem]
    if len(items) < 2 or items[0][0] is not items[1][0] or [item[1] for item in items] != [0, 1]:
        return None
    return Quantize.of(node_arg(scale.new))


_OF_CODES = _Cache(("key_data", "key_scale", "value_data", "value_scale"), RotateQuantizeAndStore, _in_codes)
#: attention -> its cache
_CACHES = {
    decoding_attention: _Cache(("keys", "values"), RotateAndStore, _in_bfloat16),
    decoding_attention_mx: _OF_CODES,
    attention_mx: _OF_CODES,
}
