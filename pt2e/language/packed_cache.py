"""Store the cache of a converted decoder as codes and scales instead of dequantized values.

The keys and values of each token are blocks of their own, so a cache of codes holds the same values to the bit.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.node import Dequantize, args_of, set_value, value_of
from pt2mx.fx.graph.qdq import SPEC_KEY
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.pt2e.language.cache import KINDS, Layers, by_layer
from pt2mx.pt2e.language.signature import free_inputs, inputs_of, set_inputs

_WRITE = torch.ops.aten.index_copy_.default
_SIZE = torch.ops.aten.sym_size.int


def pack_cache(model: GraphModule) -> GraphModule:
    """Replace the cache tensors to which a decoder writes quantized values by inputs of codes and scales.

    Changes `model` and returns it.

    Raises:
        MXError: where such a tensor is read before it is written, or written more than once.
    """
    named = free_inputs(model)
    for kind in filter(KINDS.get, named):
        named[kind] = [_pack(stored) for stored in named[kind]]
    set_inputs(model, named)
    return model


def layers_in(model: GraphModule) -> Layers:
    """Return the layers of the cache in the inputs of a decoder's graph: tensors, or codes and scales."""
    return by_layer(pytree.tree_map(value_of, inputs_of(model)))


def _pack(tensor: Node) -> Node | list[Node]:
    """Replace an input by inputs of codes and scales, and return them; return it where its values are not quantized."""
    writes = [node for node in tensor.users if node.target is _WRITE and node.args[0] is tensor]
    pairs = [pair for node in writes if (pair := Dequantize.of(args_of(node)[3])) is not None]
    if not writes or len(pairs) < len(writes):
        return tensor
    if len(writes) > 1:
        raise MXError(
            f"the cache {tensor.name} is written {len(writes)} times: kv_cache takes one that is written once"
        )
    (write,), (pair,) = writes, pairs
    graph, stored = tensor.graph, []
    for suffix, values in (("codes", pair.codes), ("scale", pair.scale)):
        with graph.inserting_before(tensor):
            placeholder = graph.placeholder(f"{tensor.name}_{suffix}")
        like = value_of(values)
        placeholder.meta["val"] = like.new_empty((*value_of(tensor).shape[:3], like.shape[3]))
        stored.append(placeholder)
    with graph.inserting_before(write):
        written = [
            graph.call_function(_WRITE, (placeholder, *args_of(write)[1:3], values))
            for placeholder, values in zip(stored, (pair.codes, pair.scale), strict=True)
        ]
        from_cache = pair.replace(codes=written[0], scale=written[1])
        read = graph.call_function(Dequantize.overload, from_cache.args)
    for node in (*written, read):
        set_value(node)
    read.meta[SPEC_KEY] = args_of(write)[3].meta[SPEC_KEY]
    write.replace_all_uses_with(read)
    source = args_of(write)[3]
    graph.erase_node(write)
    _replace_reads(tensor, read, stored[0])
    graph.erase_node(tensor)
    erase_unused(source)
    return stored


def _replace_reads(tensor: Node, read: Node, codes: Node) -> None:
    """Replace a tensor by `read` in its users, and by the codes where a user reads its size."""
    order = {node: i for i, node in enumerate(tensor.graph.nodes)}
    for user in list(tensor.users):
        if user.target is _SIZE:
            user.replace_input_with(tensor, codes)
        elif order[user] < order[read]:
            raise MXError(f"{user.name} reads the cache {tensor.name} before it is written: leave kv_cache out")
        else:
            user.replace_input_with(tensor, read)
