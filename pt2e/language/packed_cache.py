"""A cache of codes: what a converted decoder writes to its cache, quantized and dequantized, is stored before that.

Each token's keys and values are blocks of their own, so that a cache of codes holds the values of the other one to the
bit.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.node import Dequantize, args_of, set_value, value_of
from pt2mx.fx.graph.qdq import SPEC_KEY
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.pt2e.language.cache import equal_extents
from pt2mx.pt2e.language.graph_inputs import free_inputs, inputs_of, set_inputs

_WRITE = torch.ops.aten.index_copy_.default
_SIZE = torch.ops.aten.sym_size.int


def pack_cache(model: GraphModule) -> GraphModule:
    """Give a converted decoder inputs of codes and scales in place of each tensor of its cache that it writes quantized
    values to. Changes `model` and returns it.

    Raises:
        MXError: where such a tensor is read before it is written, or written in another way too.
    """
    named = free_inputs(model)
    for kind in ("keys", "values"):
        named[kind] = [_packed(held) for held in named[kind]]
    _check_extents(named)
    set_inputs(model, named)
    return model


def _check_extents(inputs: dict[str, Any]) -> None:
    """Say in the graph which extents are the same."""
    graph = inputs["input_ids"].graph
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        first = graph.call_function(_SIZE, (last, 0))  # what follows is inserted behind the placeholders
    with graph.inserting_before(first):
        for same in equal_extents(inputs):
            sizes = [graph.call_function(_SIZE, extent) for extent in same]
            for size in sizes[1:]:
                graph.call_function(torch._check, (graph.call_function(operator.eq, (sizes[0], size)),))
    graph.erase_node(first)


def layers_in(model: GraphModule) -> Any:
    """The keys and values of each layer that a decoder's graph takes: tensors, or codes and scales."""
    named = pytree.tree_map(value_of, inputs_of(model))
    return list(zip(named["keys"], named["values"], strict=True))


def _packed(held: Node) -> Node | list[Node]:
    """The codes and scales that are written in place of a tensor; itself where its values are not quantized."""
    writes = [node for node in held.users if node.target is _WRITE and node.args[0] is held]
    pairs = [pair for node in writes if (pair := Dequantize.of(args_of(node)[3])) is not None]
    if not writes or len(pairs) < len(writes):
        return held
    if len(writes) > 1:
        raise MXError(f"the cache {held.name} is written {len(writes)} times: kv_cache takes one that is written once")
    (write,), (pair,) = writes, pairs
    graph, stored = held.graph, []
    for suffix, values in (("codes", pair.codes), ("scale", pair.scale)):
        with graph.inserting_before(held):
            placeholder = graph.placeholder(f"{held.name}_{suffix}")
        like = value_of(values)
        placeholder.meta["val"] = like.new_empty((*value_of(held).shape[:3], like.shape[3]))
        stored.append(placeholder)
    with graph.inserting_before(write):
        for placeholder, values in zip(stored, (pair.codes, pair.scale), strict=True):
            set_value(graph.call_function(_WRITE, (placeholder, *args_of(write)[1:3], values)))
        now = pair.replace(codes=stored[0], scale=stored[1])
        read = graph.call_function(Dequantize.overload, now.args)
    set_value(read)
    read.meta[SPEC_KEY] = args_of(write)[3].meta[SPEC_KEY]
    write.replace_all_uses_with(read)
    source = args_of(write)[3]
    graph.erase_node(write)
    _read_instead(held, read, stored[0])
    graph.erase_node(held)
    erase_unused(source)
    return stored


def _read_instead(held: Node, read: Node, codes: Node) -> None:
    """Have the readers of a tensor read what was stored, and its extents be those of the codes."""
    order = {node: i for i, node in enumerate(held.graph.nodes)}
    for user in list(held.users):
        if user.target is _SIZE:
            user.replace_input_with(held, codes)
        elif order[user] < order[read]:
            raise MXError(f"{user.name} reads the cache {held.name} before it is written: leave kv_cache out")
        else:
            user.replace_input_with(held, read)
