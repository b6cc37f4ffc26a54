"""New keys and values: one operator that quantizes them into a cache of codes."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import Writes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import Quantize, args_of, insert_call, named_args, node_arg, value_of
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.kernels.select import supports
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.cache import StoreMX

aten = torch.ops.aten


class _Written(NamedTuple):
    """The quantization of new values, and the writes of its codes and scales into a cache."""

    quantize: Node
    call: Quantize
    slots: Node
    writes: tuple[Node, Node]


@graph_pass(attention_mx, Quantize, aten.index_copy_.default)
def fuse_cache_writes(model: GraphModule) -> None:
    """Replace the quantization of new keys and values before `attention_mx`, and the writes of their codes and scales,
    by `store_mx`.

    The pass skips caches that anything else reads or writes, and devices without a kernel for it.
    """
    nodes = model.graph.find_nodes(op="call_function", target=attention_mx)
    pairs = [(node, *pair) for node in nodes if (pair := _pair(node))]
    if not pairs:
        return
    graph_writes = Writes(model.graph)
    for node, keys, values in pairs:
        between = (graph_writes.between(one.quantize, node, (one.call.x, one.slots)) for one in (keys, values))
        if any(between):
            continue
        writes = *keys.writes, *values.writes
        specs: list[Any] = [keys.call.spec]
        nodes = [keys.call.x, values.call.x, *(node_arg(write) for write in writes), keys.slots]
        try:
            StoreMX(*map(value_of, nodes), *specs).check()
        except MXError:
            continue
        insert_call(node, StoreMX(*nodes, *specs))
        for write in writes:
            part = node_arg(write, 3)
            write.replace_all_uses_with(node_arg(write))
            model.graph.erase_node(write)  # it has an effect, so `erase_unused` keeps it
            erase_unused(part)


def _pair(node: Node) -> tuple[_Written, _Written] | None:
    """Return the writes of keys and values before an attention; None if `store_mx` does not support them."""
    call = named_args(node)
    keys = _written(node, call["key_data"], call["key_scale"])
    values = _written(node, call["value_data"], call["value_scale"])
    if keys is None or values is None or keys.slots is not values.slots or keys.quantize is values.quantize:
        return None
    return (keys, values) if keys.call.replace(x=values.call.x) == values.call else None


def _written(attention: Node, codes: Node, scale: Node) -> _Written | None:
    writes = _write(attention, codes), _write(attention, scale)
    if (
        writes[0] is None
        or writes[1] is None
        or codes is scale
        or not supports("store codes of new tokens", value_of(codes))
    ):
        return None
    (slots, data), (scale_slots, scales) = (args_of(write)[2:] for write in writes)  # type: ignore[arg-type]
    for part, index in ((data, 1), (scales, 0)):
        if part.target is not operator.getitem or part.args[1] != index or len(part.users) != 1:
            return None
    quantize = node_arg(data)
    call = Quantize.of(quantize)
    if call is None or node_arg(scales) is not quantize or slots is not scale_slots:
        return None
    spec = call.spec
    is_plain = spec.axis in (-1, 3) and call.seed is None and spec.has_plain_scale and spec.rounding != "stochastic"
    return _Written(quantize, call, slots, writes) if is_plain else None  # type: ignore[arg-type]


def _write(attention: Node, stored: Node) -> Node | None:
    """Return the only write of a cache, an input that only an attention reads, before or as the write returns it; None
    for another one."""
    returned = stored.target is aten.index_copy_.default
    cache = node_arg(stored) if returned else stored
    users = [user for user in cache.users if user.target is not aten.sym_size.int and user is not attention]
    if cache.op != "placeholder" or len(users) != 1 or users[0].target is not aten.index_copy_.default:
        return None
    (write,) = users
    readers = [attention] if returned else []
    is_plain = args_of(write)[:2] == (cache, 2) and list(write.users) == readers and write < attention
    return write if is_plain else None
