"""Prepare a converted model for torch's ONNX exporter: one operator for each quantized tensor."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import GroupedLinearMX, is_ours, node_arg, value_of
from pt2mx.fx.graph.qdq import unlike_converted
from pt2mx.fx.graph.tensors import erase_unused, tensors_in_written_memory, without_torch_warnings
from pt2mx.fx.passes.accumulate import refuse_accumulators
from pt2mx.fx.passes.packed_operands import MATMULS
from pt2mx.ops.decompositions import call_decompositions
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.program.export_again import PASSES, with_packed_weights
from pt2mx.pt2e.program.sizes import dynamic_shapes as shapes_of

aten = torch.ops.aten

#: operators that become a node
_NODES = (ops.fake_quantize_mx, ops.dequantize_mx, ops.tensor_scale_mx)
#: the matmuls of experts, which ONNX lacks
_GROUPED = {name for name, matmul in MATMULS.items() if matmul.packed is GroupedLinearMX}


@GraphPass
def drop_size_assertions(model: GraphModule) -> None:
    """Erase the assertions on sizes of codes and scales, and the nodes that only they use.

    Export writes them if blocks run along a dynamic dimension. `quantize_mx` always fulfils them, and they would
    prevent the fusion of codes and scales, because these would have another user.
    """
    for node in model.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        if _is_size_of_codes(node):
            condition = node_arg(node)
            model.graph.erase_node(node)
            erase_unused(condition)


def _is_size_of_codes(node: Node) -> bool:
    """Return whether a number depends on a size of codes or scales."""
    if node.target is aten.sym_size.int:
        item = node_arg(node)
        return item.target is operator.getitem and node_arg(item).target is ops.quantize_mx
    return any(_is_size_of_codes(n) for n in node.all_input_nodes if not isinstance(value_of(n), Tensor))


def exportable(model: object, inputs: object, dynamic_shapes: Any) -> ExportedProgram:
    """Export the model again, as a program that fake quantizes activations and dequantizes constants.

    Arguments are as `export_onnx` takes them.
    """
    graph, args, kwargs, shapes = _export_arguments(model, inputs, dynamic_shapes)
    _check_experts(graph)
    graph = with_packed_weights(graph, (drop_size_assertions, *PASSES))
    with torch.no_grad(), without_torch_warnings():
        with user_errors("export the model for these inputs and dynamic shapes"):
            program = torch.export.export(graph, args, kwargs, dynamic_shapes=shapes)
        _check_inputs_stay(program)
        _check_dtypes(graph, program)
        if any(map(_is_fused, _nodes(program.graph_module))):
            program = program.run_decompositions(call_decompositions())
    _check_operators(program)
    return program


def _nodes(model: GraphModule) -> Iterator[Node]:
    for graph in graph_modules(model):
        yield from graph.graph.nodes


def _check_experts(model: GraphModule) -> None:
    for node in _nodes(model):
        if str(node.target) in _GROUPED:
            raise MXError(
                f"the model has experts, whose matmul {node.target} has no ONNX form: run it by `pt2mx generate` or as "
                "a package. An export after transformers' model.set_experts_implementation('batched_mm') has one, with "
                "experts in high precision"
            )


def _check_inputs_stay(program: ExportedProgram) -> None:
    """Raise an MXError for a program that writes to its inputs, because an ONNX file would lose these writes."""
    written = {node.name for node in written_nodes(program.graph) if node.op == "placeholder"}
    for name in program.graph_signature.user_inputs:
        if name in written:
            raise MXError(
                f"the model writes to its input {name!r}, and an ONNX graph writes to none: give a model that returns "
                "the new values; of a language model give the LanguageModel, or the folder of `pt2mx quantize`"
            )


def _export_arguments(model: object, inputs: object, shapes: Any) -> tuple[GraphModule, tuple, dict[str, Any], Any]:
    args, kwargs = (), {}
    if isinstance(inputs, tuple | list):
        args = tuple(inputs)
    elif isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif inputs is not None:
        kind = type(inputs).__name__
        raise MXError(f"example_inputs are a tuple of inputs or a mapping of keyword inputs, not {kind}")
    if isinstance(model, ExportedProgram):
        graph = model.module()
        shapes = shapes_of(model, graph) if shapes is None else shapes
        if inputs is None and model.example_inputs is not None:
            args, kwargs = inputs = model.example_inputs
    elif isinstance(model, GraphModule):
        graph = model
    else:
        raise MXError(f"expected a converted graph module or an ExportedProgram, not {type(model).__name__}")
    if inputs is None:
        raise MXError("give example_inputs: a tuple of the model's inputs, or a mapping of its keyword inputs")
    _check_converted(graph)
    # torch.export reads keyword inputs in the order of the mapping and ignores their names, so sort them as the
    # signature does
    named = {name: kwargs[name] for name in inspect.signature(graph.forward).parameters if name in kwargs}
    return graph, args, named | kwargs, shapes


def _check_converted(model: GraphModule) -> None:
    if written := tensors_in_written_memory(model):
        raise MXError(f"the model writes to its buffer {min(written)!r}, which an ONNX file cannot: make it an input")
    if kind := unlike_converted(model, model.state_dict()):
        raise MXError(f"expected a converted model, not {kind}: pass what convert_pt2e returned, or an export of it")
    refuse_accumulators(model, "ONNX files")


def _check_dtypes(model: GraphModule, program: ExportedProgram) -> None:
    """Raise an MXError for an input of another dtype than the model's, because fused operators would compute in that
    dtype."""
    inputs = list(program.graph.find_nodes(op="placeholder"))[-len(program.graph_signature.user_inputs) :]
    for node, exported in zip(model.graph.find_nodes(op="placeholder"), inputs, strict=True):
        x, original = value_of(exported), value_of(node)
        if isinstance(x, Tensor) and isinstance(original, Tensor) and x.dtype != original.dtype:
            raise MXError(f"the input {node.target!r} is of {x.dtype}, but the model was exported for {original.dtype}")


def _is_fused(node: Node) -> bool:
    return is_ours(node) and node.target not in _NODES


def _check_operators(program: ExportedProgram) -> None:
    for value in pytree.tree_leaves(program.graph.output_node().args):
        if not isinstance(value, Node) and value is not None:
            raise MXError(f"the output {value!r} is no tensor, and an ONNX file has no other outputs: leave it out")
    for node in filter(_is_fused, _nodes(program.graph_module)):
        raise MXError(
            f"{node.target} of {node.name!r} has no ONNX form: codes of activations are read where they are "
            "dequantized alone, at the shape that was quantized"
        )
