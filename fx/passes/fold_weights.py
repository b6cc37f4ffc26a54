"""Weight folding: a quantized weight becomes buffers of its codes, and the float weight goes."""

import operator

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.constants import constant_nodes, evaluate, first_equal, root_name
from pt2mx.fx.graph.lift_weights import lift_weights, merge_equal_operands
from pt2mx.fx.graph.subgraphs import mark_constants
from pt2mx.fx.graph.tensors import delete_unused_tensors


def fold_weights(model: GraphModule) -> GraphModule:
    """Compute every `quantize_mx` of a constant tensor now, and every quantization of torchao's.

    The codes and scales become buffers beside the parameter they come from, named `<parameter>_data` and
    `<parameter>_scale`; what is quantized twice in the same way (a tied weight) becomes one pair of them. Parameters
    and buffers that nothing reads any more are deleted. Changes `model` and returns it.
    """
    constants = constant_nodes(model.graph)
    compute_codes(model, constants)
    # export asserts the dtype of a weight that it casts; of a constant that holds already, and would keep it alive
    for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        if node.args[0] in constants:
            model.graph.erase_node(node)
    model.graph.eliminate_dead_code()
    delete_unused_tensors(model)
    model.recompile()
    return model


def compute_codes(model: GraphModule, constants: set[Node]) -> None:
    """Let what reads a quantization of a constant tensor read buffers; the quantization stays, and nothing reads it."""
    packed: dict[Node, list[Node]] = {}
    equal = first_equal(model, constants)
    with torch.no_grad():
        for node in list(model.graph.nodes):
            if node in constants and _quantizes(node):
                first = equal[node]
                if first not in packed:
                    packed[first] = _pack(model, first)
                _replace(node, packed[first])
                _fold_scales(model, node)


def fold_all_weights(model: GraphModule) -> GraphModule:
    """Fold the weights of a model and of the graphs inside it, whose weights become operands of their calls. Changes
    `model` and returns it."""
    mark_constants(model)
    lift_weights(model)
    fold_weights(model)
    return merge_equal_operands(model)


def _quantizes(node: Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return node.target is ops.quantize_mx or name.startswith(_QUANTIZATIONS)


def dequantizes(node: Node) -> bool:
    """Whether a node gives the values of codes, ours or torchao's."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return node.target is ops.dequantize_mx or name.startswith(_DEQUANTIZATIONS)


#: beginnings of the names of torchao's operators
_QUANTIZATIONS = ("quantized_decomposed::quantize_", "torchao::quantize_affine")
_DEQUANTIZATIONS = ("quantized_decomposed::dequantize_", "torchao::dequantize_affine")


def _pack(model: GraphModule, quantize: Node) -> list[Node]:
    """Register what a quantizing operator returns as buffers; gives the nodes that read them."""
    args, kwargs = torch.fx.map_arg((quantize.args, quantize.kwargs), lambda n: evaluate(model, n))
    results = quantize.target(*args, **kwargs)
    named = (
        {"data": results} if isinstance(results, torch.Tensor) else dict(zip(("scale", "data"), results, strict=True))
    )
    root = root_name(quantize.args[0])
    with model.graph.inserting_before(quantize):
        return [model.graph.get_attr(register(model, f"{root}_{suffix}", t)) for suffix, t in named.items()]


def _replace(quantize: Node, buffers: list[Node]) -> None:
    several = len(buffers) > 1
    for node in [u for u in quantize.users if u.target is operator.getitem] if several else [quantize]:
        buffer = buffers[node.args[1] if several else 0]
        buffer.meta.update(node.meta)
        node.replace_all_uses_with(buffer)


def _fold_scales(model: GraphModule, quantize: Node) -> None:
    """Scales that torchao computes from the tensor (dynamic quantization): the dequantization reads them too."""
    for argument, value in zip(quantize.target._schema.arguments[1:], quantize.args[1:], strict=False):
        if isinstance(value, Node) and value.op == "call_function":
            fold_constant(model, value, f"{root_name(value)}_{argument.name}")


def fold_constant(model: GraphModule, node: Node, name: str) -> Node:
    """Make the value of a constant node a buffer, named `name` or like it; gives the node that reads it."""
    with model.graph.inserting_before(node):
        buffer = model.graph.get_attr(register(model, name, evaluate(model, node)))
    buffer.meta.update(node.meta)
    node.replace_all_uses_with(buffer)
    return buffer


def register(model: GraphModule, name: str, value: torch.Tensor) -> str:
    """Register a buffer under a qualified name, or under a numbered one where that is taken."""
    path, _, attribute = name.rpartition(".")
    owner, unique, number = model.get_submodule(path), attribute, 0
    while hasattr(owner, unique):
        number += 1
        unique = f"{attribute}_{number}"
    owner.register_buffer(unique, value)
    return f"{path}.{unique}" if path else unique
