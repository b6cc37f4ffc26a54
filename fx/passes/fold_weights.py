"""Compute constants once, into buffers: codes and scales of quantized weights, and biases with a batch norm in them."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.constants import (
    CONSTANT_KEY,
    constant_nodes,
    evaluate,
    first_equal,
    hoist_weights,
    mark_constants,
    merge_equal_operands,
    root_name,
)
from pt2mx.fx.graph.convolution import LAYERS
from pt2mx.fx.graph.higher_order_ops import call_groups, graph_modules
from pt2mx.fx.graph.node import args_of, function_of, node_arg, operator_of, register_buffer
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.ops.accumulated import convolution_accumulated, linear_accumulated

aten = torch.ops.aten

#: layers whose third argument is the bias
_WITH_BIAS = frozenset((*LAYERS, linear_accumulated, convolution_accumulated))


def fold_weights(model: GraphModule) -> GraphModule:
    """Compute every quantization of a constant tensor now, by `quantize_mx` or an operator of torchao.

    The codes and scales become buffers next to the parameter they come from, named `<parameter>_data`,
    `<parameter>_scale` and, of formats with a scale a tensor, `<parameter>_tensor_scale`; a tensor quantized twice in
    the same way (a tied weight) gets one pair. Unused parameters and buffers are deleted. Changes `model` and returns
    it.
    """
    _fold_amaxes(model)
    compute_codes(model, constant_nodes(model.graph))
    _erase_assertions(model)
    return remove_unused(model)


def _erase_assertions(model: GraphModule) -> None:
    """Erase the assertions about constants: export asserts the dtype of a weight that it casts, which would keep the
    weight alive."""
    assertions = model.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default)
    constants = constant_nodes(model.graph) if assertions else set()
    for node in assertions:
        if node.args[0] in constants:
            model.graph.erase_node(node)


def _fold_amaxes(model: GraphModule) -> None:
    """Store the magnitude that several weights share, from which their tensor scale follows."""
    scales = list(model.graph.find_nodes(op="call_function", target=ops.tensor_scale_mx))
    constants = constant_nodes(model.graph) if scales else set()
    for node in scales:
        amax = node_arg(node)
        is_shared = len(amax.users) > 1 and all(user.target is ops.tensor_scale_mx for user in amax.users)
        if is_shared and amax in constants and amax.op == "call_function":
            fold_constant(model, amax, f"{root_name(amax)}_amax")


def compute_codes(model: GraphModule, constants: set[Node]) -> None:
    """Make the users of each quantization of a constant tensor read buffers instead; the quantizations stay, unused."""
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
    """Fold the weights of a model and of its subgraphs. Weights of subgraphs become operands of the calls. Changes
    `model` and returns it."""
    if not call_groups(model):
        return fold_weights(model)
    mark_constants(model)
    for graph in graph_modules(model):
        _erase_assertions(graph)
    hoist_weights(model)
    fold_weights(model)
    return merge_equal_operands(model)


def fold_biases(model: GraphModule) -> GraphModule:
    """Fold biases that a converted graph computes, after a batch norm in training (`NormalizedLayer`), into buffers.
    Biases of subgraphs, whose tensors are operands, stay. Changes `model` and returns it."""
    if any(placeholder.meta.get(CONSTANT_KEY) for placeholder in model.graph.find_nodes(op="placeholder")):
        return model
    computed = {computed_bias(node) for node in model.graph.nodes} - {None}
    constants = constant_nodes(model.graph) if computed else set()
    biases = [node for node in model.graph.nodes if node in computed and node in constants]
    with torch.no_grad():
        for bias in biases:
            fold_constant(model, bias, f"{root_name(bias)}_folded")
    return remove_unused(model) if biases else model


def computed_bias(node: Node) -> Node | None:
    """Return the bias of a layer if an operator computes it, other than a dequantization; otherwise None."""
    bias = node.args[2] if node.target in _WITH_BIAS and len(node.args) > 2 else None
    if not isinstance(bias, Node) or bias.op != "call_function" or _dequantizes(bias):
        return None
    return bias


def _quantizes(node: Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return node.target is ops.quantize_mx or name.startswith(_QUANTIZATIONS)


def _dequantizes(node: Node) -> bool:
    """Return whether a node dequantizes codes, of pt2mx or torchao."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return node.target is ops.dequantize_mx or name.startswith(_DEQUANTIZATIONS)


#: prefixes of the names of torchao's quantization operators
_QUANTIZATIONS = ("quantized_decomposed::quantize_", "torchao::quantize_affine")
_DEQUANTIZATIONS = ("quantized_decomposed::dequantize_", "torchao::dequantize_affine")


def _pack(model: GraphModule, quantize: Node) -> list[Node]:
    """Register the results of a quantizing operator as buffers, and return the nodes that read them."""
    args, kwargs = torch.fx.map_arg((quantize.args, quantize.kwargs), lambda n: evaluate(model, n))
    results = function_of(quantize)(*args, **kwargs)
    named = (
        {"data": results} if isinstance(results, torch.Tensor) else dict(zip(("scale", "data"), results, strict=True))
    )
    root = root_name(node_arg(quantize))
    with model.graph.inserting_before(quantize):
        return [model.graph.get_attr(register_buffer(model, f"{root}_{suffix}", t)) for suffix, t in named.items()]


def _replace(quantize: Node, buffers: list[Node]) -> None:
    """Replace the results of a quantizing operator by buffers."""
    results = [(quantize, 0)]
    if len(buffers) > 1:
        results = [(user, args_of(user)[1]) for user in quantize.users if user.target is operator.getitem]
    for node, item in results:
        buffers[item].meta.update(node.meta)
        node.replace_all_uses_with(buffers[item])


def _fold_scales(model: GraphModule, quantize: Node) -> None:
    """Fold the scales that torchao computes from the tensor (dynamic quantization), which the dequantization reads
    too."""
    for argument, value in zip(operator_of(quantize)._schema.arguments[1:], quantize.args[1:], strict=False):
        if isinstance(value, Node) and value.op == "call_function":
            fold_constant(model, value, f"{root_name(node_arg(quantize))}_{argument.name}")


def fold_constant(model: GraphModule, node: Node, name: str) -> Node:
    """Register the value of a constant node as a buffer named `name`, numbered if needed, and return the node that
    reads it."""
    value = evaluate(model, node)
    if value.nbytes != value.untyped_storage().nbytes():
        value = value.clone()  # saving a view would save its whole storage
    with model.graph.inserting_before(node):
        buffer = model.graph.get_attr(register_buffer(model, name, value))
    buffer.meta.update(node.meta)
    node.replace_all_uses_with(buffer)
    return buffer
