"""Which batch norms can be folded into the layer before them."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import value_of

aten = torch.ops.aten
_BATCH_NORMS = (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default)
#: layer before a batch norm -> (whether its weight is (in, out / groups, ...), position of its groups)
LAYERS: dict[torch._ops.OpOverload, tuple[bool, int | None]] = {
    aten.linear.default: (False, None),
    aten.conv1d.default: (False, 6),
    aten.conv1d.padding: (False, 6),
    aten.conv2d.default: (False, 6),
    aten.conv2d.padding: (False, 6),
    aten.conv3d.default: (False, 6),
    aten.conv3d.padding: (False, 6),
    aten.conv_transpose1d.default: (True, 6),
    aten.conv_transpose2d.input: (True, 6),
    aten.conv_transpose3d.input: (True, 6),
}


def keep_batch_norms(model: GraphModule) -> GraphModule:
    """Put an `alias` before each batch norm that must not be folded: its producer, or the producer's weight, has other
    users; it normalizes another dimension than the producer's outputs; it has no running statistics; it follows a
    transposed convolution in groups; a tensor of theirs or of the layer is computed, or written by the graph.

    torchao folds a batch norm into the convolution or linear layer before it without asking for any of this, and would
    give other numbers; behind an alias it does not see them. Changes `model` and returns it.
    """
    readers: dict[str, int] = {}
    for node in model.graph.find_nodes(op="get_attr"):
        readers[node.target] = readers.get(node.target, 0) + len(node.users)
    written = written_nodes(model.graph)
    norms = [norm for target in _BATCH_NORMS for norm in model.graph.find_nodes(op="call_function", target=target)]
    for norm in norms:
        producer = norm.args[0]
        if producer.target not in LAYERS:
            continue
        weights = [n for n in producer.all_input_nodes if n.op == "get_attr"]
        shared = len(producer.users) > 1 or any(readers[weight.target] > 1 for weight in weights)
        tensors = [n for n in (*producer.args[1:3], *norm.args[1:5]) if isinstance(n, Node)]
        computed = any(n.op != "get_attr" or n in written for n in tensors)
        fits = norm.args[3] is not None and normalizes_outputs(producer, norm)
        if shared or computed or not fits or _is_grouped_transposed(producer):
            with model.graph.inserting_before(norm):
                alias = model.graph.call_function(aten.alias.default, (producer,))
            alias.meta.update(producer.meta)
            norm.replace_input_with(producer, alias)
    if norms:
        model.recompile()
    return model


def normalizes_outputs(layer: Node, norm: Node) -> bool:
    """Whether a batch norm, whose channels are dimension 1, normalizes the outputs of a convolution or linear layer,
    which an unbatched convolution has in dimension 0 and a linear layer in the last; all in one dtype."""
    tensors = [value_of(n) for n in (layer, *layer.args[1:2], norm.args[4], norm.args[1]) if n is not None]
    if len(tensors) < 3 or not all(isinstance(value, Tensor) for value in tensors):
        return False
    value, weight, *others = tensors
    batched = value.dim() == (2 if layer.target is aten.linear.default else weight.dim())
    return batched and all(other.dtype == weight.dtype for other in others)


def _is_grouped_transposed(node: Node) -> bool:
    transposed, position = LAYERS[node.target]
    return transposed and len(node.args) > position and node.args[position] > 1
