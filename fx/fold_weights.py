"""Weight folding: `quantize_mx(weight)` becomes packed buffers, and the float weight goes."""

import operator

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.constants import constant_nodes, evaluate, root_name
from pt2mx.fx.unused import delete_unused_tensors


def fold_weights(model: GraphModule) -> GraphModule:
    """Compute every `quantize_mx` of a constant tensor now.

    Its codes and scales become uint8 buffers beside the parameter they come from, named `<parameter>_data` and
    `<parameter>_scale`; parameters and buffers that nothing reads any more are deleted. Changes `model` and returns it.
    """
    constants = constant_nodes(model.graph)
    with torch.no_grad():
        for node in model.graph.find_nodes(op="call_function", target=ops.quantize_mx):
            if node.args[0] in constants:
                _fold(model, node)
    # export asserts the dtype of a weight that it casts; of a constant that holds already, and would keep it alive
    for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        if node.args[0] in constants:
            model.graph.erase_node(node)
    model.graph.eliminate_dead_code()
    delete_unused_tensors(model)
    model.recompile()
    return model


def _fold(model: GraphModule, quantize: Node) -> None:
    x, *modes = quantize.args
    packed = ops.quantize_mx(evaluate(model, x), *modes)  # (scale, data)
    for suffix, item in (("data", 1), ("scale", 0)):
        name = _register(model, f"{root_name(x)}_{suffix}", packed[item])
        with model.graph.inserting_before(quantize):
            buffer = model.graph.get_attr(name)
        for user in [u for u in quantize.users if u.target is operator.getitem and u.args[1] == item]:
            buffer.meta.update(user.meta)
            user.replace_all_uses_with(buffer)


def fold_constant(model: GraphModule, node: Node, name: str) -> None:
    """Make the value of a constant node a buffer, named `name` or like it."""
    with model.graph.inserting_before(node):
        buffer = model.graph.get_attr(_register(model, name, evaluate(model, node)))
    buffer.meta.update(node.meta)
    node.replace_all_uses_with(buffer)


def _register(model: GraphModule, name: str, value: torch.Tensor) -> str:
    """Register a buffer under a qualified name, or under a numbered one where that is taken."""
    path, _, attribute = name.rpartition(".")
    owner, unique, number = model.get_submodule(path), attribute, 0
    while hasattr(owner, unique):
        number += 1
        unique = f"{attribute}_{number}"
    owner.register_buffer(unique, value)
    return f"{path}.{unique}" if path else unique
