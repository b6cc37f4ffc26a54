"""Batch norms that must not be folded into what they normalize."""

import torch
from torch.fx import GraphModule

aten = torch.ops.aten
_BATCH_NORMS = (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default)


def keep_shared_batch_norms(model: GraphModule) -> GraphModule:
    """Put an `alias` before each batch norm whose producer, or the producer's weight, has other users.

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
        if len(producer.users) > 1 or any(readers[weight.target] > 1 for weight in weights):
            with model.graph.inserting_before(norm):
                alias = model.graph.call_function(aten.alias.default, (producer,))
            alias.meta.update(producer.meta)
            norm.replace_input_with(producer, alias)
    if norms:
        model.recompile()
    return model
