"""RoPE and the write of the cache in a decoder's step: one operator instead of a kernel for each tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import args_of, insert_before, named_args, node_arg, shape_of, value_of
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.ops.decoding import decoding_attention
from pt2mx.ops.rope import RotateAndStore, rotate_and_store

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


@graph_pass(decoding_attention)
def fuse_rope(model: GraphModule) -> None:
    """Replace the rotation of queries and keys before `decoding_attention`, and the writes of its cache, by
    `rotate_and_store`.

    The pass skips rotations of other forms or of a part of a head, and caches that anything else reads or writes.
    """
    for node in model.graph.find_nodes(op="call_function", target=decoding_attention):
        call = named_args(node)
        query, keys, values = _rotated(call["query"]), _written(call["keys"]), _written(call["values"])
        key = None if keys is None else _rotated(keys.new)
        if query is None or key is None or keys is None or values is None or not _fits(query, key, keys, values):
            continue
        tensors = query.x, key.x, values.new, keys.cache, values.cache, keys.slots, query.cos, query.sin
        rotated = insert_before(node, rotate_and_store, *tensors)
        for name, new in (("query", rotated), ("keys", keys.cache), ("values", values.cache)):
            node.replace_input_with(call[name], new)
        for written, read in ((keys, call["keys"]), (values, call["values"])):
            erase_unused(read)
            if written.write in model.graph.nodes:  # it has an effect, so `erase_unused` keeps it
                model.graph.erase_node(written.write)
            erase_unused(written.new)
        erase_unused(call["query"])


def _fits(query: _Rotated, key: _Rotated, keys: _Written, values: _Written) -> bool:
    alone = all(_is_alone(node) for written in (keys, values) for node in (written.cache, written.write))
    if not alone or query.cos is query.sin or keys.slots is not values.slots:
        return False
    factors = [(query.cos, key.cos), (query.sin, key.sin)]
    if any(_source(one) is not _source(other) or shape_of(one) != shape_of(other) for one, other in factors):
        return False
    read = query.x, key.x, values.new, keys.cache, values.cache, keys.slots, query.cos, query.sin
    try:
        RotateAndStore(*map(value_of, read)).check()
    except MXError:
        return False
    return True


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
    if not isinstance(node, Node) or node.target is not aten.cat.default:
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
    is_second = args_of(second)[1] in (-1, last) and args_of(second)[2] == width // 2 and args_of(second)[3] >= width
    return x if is_second else None
