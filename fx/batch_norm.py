"""Batch norms that must not be folded into what they normalize."""

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
_BATCH_NORMS = (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default)
#: transposed convolution -> position of its groups
_TRANSPOSED = {aten.conv_transpose1d.default: 6, aten.conv_transpose2d.input: 6, aten.conv_transpose3d.input: 6}


def keep_shared_batch_norms(model: GraphModule) -> GraphModule:
    """Put an `alias` before each batch norm whose producer, or the producer's weight, has other users, and before those
    that torchao fails to fold: without running statistics, after a transposed convolution in groups, or where a tensor
    of theirs or of the layer is computed.

    torchao folds a batch norm into the convolution or linear layer before it without asking whether something else
    reads their output or their weight, and would change it there too; behind an alias it does not see them. Changes
    `model` and returns it.
    """
    readers: dict[str, int] = {}
    for node in model.graph.find_nodes(op="get_attr"):
        readers[node.target] = readers.get(node.target, 0) + len(node.users)
    norms = [norm for target in _BATCH_NORMS for norm in model.graph.find_nodes(op="call_function", target=target)]
    for norm in norms:
        producer = norm.args[0]
        weights = [n for n in producer.all_input_nodes if n.op == "get_attr"]
        shared = len(producer.users) > 1 or any(readers[weight.target] > 1 for weight in weights)
        computed = any(isinstance(n, Node) and n.op != "get_attr" for n in (*producer.args[1:3], *norm.args[1:5]))
        if shared or computed or norm.args[3] is None or _is_grouped_transposed(producer):
            with model.graph.inserting_before(norm):
                alias = model.graph.call_function(aten.alias.default, (producer,))
            alias.meta.update(producer.meta)
            norm.replace_input_with(producer, alias)
    if norms:
        model.recompile()
    return model


def _is_grouped_transposed(node: Node) -> bool:
    position = _TRANSPOSED.get(node.target)
    return position is not None and len(node.args) > position and node.args[position] > 1
