"""Undo the quantization of a converted graph: a float graph whose parameters have the values of the codes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.constants import (
    constant_nodes,
    evaluate,
    first_equal,
    hoist_constants,
    mark_constants,
    merge_equal_operands,
    root_name,
)
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import (
    Dequantize,
    Quantize,
    dtype_of,
    free_name,
    insert_before,
    name_of,
    parameter_of,
    register_buffer,
)
from pt2mx.fx.graph.qdq import PROVENANCE_KEYS, ROUNDED_KEY, SPEC_KEY, quantize_of, spec_of_dequantize
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.spec import MXSpec

aten = torch.ops.aten


class DecodedWeight(NamedTuple):
    """A packed weight that a float parameter replaces.

    Args:
        call: the call that dequantized it; the nodes in it are gone.
        tensors: field of the call -> codes, scales and, for formats with one, the tensor scale.
        spec: the spec of the call, its axis counted from the front.
    """

    call: Dequantize
    tensors: dict[str, Tensor]
    spec: MXSpec


def undo_quantization(model: GraphModule) -> dict[str, DecodedWeight]:
    """Replace each packed weight by a parameter with its values, and remove the quantization of activations.

    Dequantizations of computed codes, such as those of a cache, stay, and are marked as not to be quantized again.
    Changes `model`.

    Args:
        model: a converted graph, not lowered.

    Returns:
        The name of each new parameter -> what it replaces.
    """
    fold_all_weights(model)  # weights that the model quantizes at each call
    for graph in graph_modules(model):
        _remove_pairs(graph)
    _hoist_weights(model)
    decoded = _to_parameters(model)
    merge_equal_operands(model)
    for graph in graph_modules(model):
        for node, _ in Dequantize.calls_in(graph.graph):
            node.meta[ROUNDED_KEY] = True
        graph.graph.eliminate_dead_code()
        graph.recompile()
    remove_unused(model)
    return decoded


def restore_codes(model: GraphModule, decoded: dict[str, DecodedWeight]) -> None:
    """Replace the parameters of `undo_quantization` that the graph still reads by their codes. Changes `model`."""
    for node in model.graph.find_nodes(op="get_attr"):
        if node.users and (weight := decoded.get(name_of(node))) is not None:
            node.replace_all_uses_with(_encoded(model, node, weight))
    remove_unused(model)


def _remove_pairs(model: GraphModule) -> None:
    """Replace the dequantization of each tensor that the graph quantizes by the tensor."""
    for node, call in list(Dequantize.calls_in(model.graph)):
        if (quantize := quantize_of(node)) is not None:
            x = Quantize.expect(quantize).x
            node.replace_all_uses_with(
                x if dtype_of(x) == call.dtype else insert_before(node, aten.to.dtype, x, call.dtype)
            )
            model.graph.erase_node(node)


def _hoist_weights(model: GraphModule) -> None:
    """Hoist the dequantization of weights out of the subgraphs, which get values as operands instead of codes."""
    mark_constants(model)
    inner = [graph for graph in graph_modules(model) if graph is not model]
    constants = {node for graph in inner for node in constant_nodes(graph.graph)}
    if weights := {node for node in constants if node.target is ops.dequantize_mx}:
        hoist_constants(model, weights)


def _to_parameters(model: GraphModule) -> dict[str, DecodedWeight]:
    """Replace the dequantized constants of a graph by parameters, equal calls by one."""
    constants = constant_nodes(model.graph)
    equal = first_equal(model, constants)
    names: dict[Node, str] = {}
    decoded: dict[str, DecodedWeight] = {}
    for node, call in list(Dequantize.calls_in(model.graph)):
        if node not in constants:
            continue
        if (first := equal[node]) not in names:
            nodes = {"codes": call.codes, "scale": call.scale, "tensor_scale": call.tensor_scale}
            tensors = {field: evaluate(model, one) for field, one in nodes.items() if one is not None}
            names[first] = register_parameter(model, parameter_of(root_name(call.codes)), evaluate(model, node))
            decoded[names[first]] = DecodedWeight(call, tensors, spec_of_dequantize(node))
        with model.graph.inserting_before(node):
            parameter = model.graph.get_attr(names[first])
        parameter.meta.update({key: node.meta[key] for key in (*PROVENANCE_KEYS, "val") if key in node.meta})
        node.replace_all_uses_with(parameter)
    for node in [node for node in equal if node.target is ops.dequantize_mx]:
        model.graph.erase_node(node)
    return decoded


def register_parameter(model: GraphModule, name: str, value: Tensor) -> str:
    """Register a parameter under a qualified name, with a number if the name is taken, and return the name."""
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    unique = free_name(owner, attribute)
    owner.register_parameter(unique, nn.Parameter(value, requires_grad=False))
    return f"{path}.{unique}" if path else unique


def _encoded(model: GraphModule, parameter: Node, weight: DecodedWeight) -> Node:
    """Insert the call that dequantizes the codes of a parameter, and return its node."""
    suffixes = {"codes": "data", "scale": "scale", "tensor_scale": "tensor_scale"}
    with model.graph.inserting_before(parameter):
        nodes = {
            field: model.graph.get_attr(register_buffer(model, f"{name_of(parameter)}_{suffixes[field]}", tensor))
            for field, tensor in weight.tensors.items()
        }
        dequantize = model.graph.call_function(ops.dequantize_mx, weight.call.replace(**nodes).args)
    for field, node in nodes.items():
        node.meta["val"] = weight.tensors[field]
    dequantize.meta.update({**parameter.meta, SPEC_KEY: weight.spec})
    return dequantize
