"""A converted model as a program that torch exports to ONNX: what is quantized is one operator each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import run_passes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import is_ours, value_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors, delete_unused_tensors, map_tensors, tensors_in_written_memory
from pt2mx.fx.passes.cse_quantize import cse_quantize
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.passes.fuse_qdq import fuse_qdq
from pt2mx.fx.passes.merge_fake_quantize import merge_fake_quantize
from pt2mx.fx.passes.packed_embedding import use_packed_embeddings
from pt2mx.fx.portable import holds_observers, is_portable
from pt2mx.ops.decompositions import call_decompositions
from pt2mx.pt2e.onnx.size_assertions import drop_size_assertions
from pt2mx.pt2e.packages.dynamic_shapes import dynamic_shapes as shapes_of
from pt2mx.pt2e.user_errors import user_errors

_PASSES = (drop_size_assertions, cse_quantize, fuse_qdq, use_packed_embeddings, merge_fake_quantize)
#: what becomes a node
_NODES = (ops.fake_quantize_mx, ops.dequantize_mx)


def exportable(model: object, inputs: object, dynamic_shapes: Any) -> ExportedProgram:
    """Return a program of the model's operators in which activations are fake quantized and constants dequantized.

    Args:
        model: a converted graph module, or an ExportedProgram.
        inputs: a tuple of positional example inputs, a mapping of keyword ones, or None for those of the program.
        dynamic_shapes: as `torch.export.export` takes them; None for those of the program.

    Raises:
        MXError: for another model, one that holds what has no ONNX form or writes to its inputs, inputs that are
            missing or that the model does not take, and dynamic shapes that it does not have.
    """
    graph, (args, kwargs), shapes = _parts(model, inputs, dynamic_shapes)
    graph = copy_sharing_tensors(graph)
    map_tensors(graph, Tensor.detach)
    fold_all_weights(graph)
    for each in graph_modules(graph):
        run_passes(each, _PASSES)
    delete_unused_tensors(graph)
    with torch.no_grad(), warnings.catch_warnings():
        # torch, of its own code
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        with user_errors("export the model for these inputs and dynamic shapes"):
            program = torch.export.export(graph, args, kwargs, dynamic_shapes=shapes)
        _check_inputs_stay(program)
        _check_dtypes(graph, program)
        if any(_is_product(node) for each in graph_modules(program.graph_module) for node in each.graph.nodes):
            program = program.run_decompositions(call_decompositions())
    _check_operators(program)
    return program


def _check_inputs_stay(program: ExportedProgram) -> None:
    """Raise an error for a program that writes to its inputs: what it writes would be lost."""
    written = {node.name for node in written_nodes(program.graph) if node.op == "placeholder"}
    for name in program.graph_signature.user_inputs:
        if name in written:
            raise MXError(
                f"the model writes to its input {name!r}, as a language model does to its cache, and an ONNX graph "
                "writes to none: give a model that returns the new values (`pt2mx quantize --output NAME.pt2`)"
            )


def _parts(model: object, inputs: object, shapes: Any) -> tuple[GraphModule, tuple[tuple, dict[str, Any]], Any]:
    """The graph module, its positional and keyword inputs, its dynamic shapes."""
    if isinstance(model, ExportedProgram):
        graph, given = model.module(), model.example_inputs if inputs is None else _positional_and_named(inputs)
        shapes = shapes_of(model, graph) if shapes is None else shapes
    elif isinstance(model, GraphModule):
        graph, given = model, None if inputs is None else _positional_and_named(inputs)
    else:
        raise MXError(f"expected a converted graph module or an ExportedProgram, not {type(model).__name__}")
    if given is None:
        raise MXError("give example_inputs: a tuple of the model's inputs, or a mapping of its keyword inputs")
    _check_converted(graph)
    args, kwargs = given
    # in the order of the signature: torch.export takes them in that of the mapping, without regard to names
    named = {name: kwargs[name] for name in inspect.signature(graph.forward).parameters if name in kwargs}
    return graph, (args, named | kwargs), shapes


def _positional_and_named(inputs: object) -> tuple[tuple, dict[str, Any]]:
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise MXError(f"example_inputs are a tuple of inputs or a mapping of keyword inputs, not {type(inputs).__name__}")


def _check_converted(model: GraphModule) -> None:
    if written := tensors_in_written_memory(model):
        raise MXError(f"the model writes to its buffer {min(written)!r}, which an ONNX file cannot: make it an input")
    if holds_observers(model.state_dict()):
        found = "one with observers, of a prepared model"
    elif is_portable(model):
        found = "a portable program, whose operators are written out"
    elif not any(is_ours(node) for graph in graph_modules(model) for node in graph.graph.nodes):
        found = "one without quantized tensors"
    else:
        return
    raise MXError(f"expected a converted model, not {found}: pass what convert_pt2e returned, or an export of it")


def _check_dtypes(model: GraphModule, program: ExportedProgram) -> None:
    """Raise an MXError for an input of another dtype than the model's, in which fused operators would compute."""
    inputs = list(program.graph.find_nodes(op="placeholder"))[-len(program.graph_signature.user_inputs) :]
    for node, given in zip(model.graph.find_nodes(op="placeholder"), inputs, strict=True):
        x, known = value_of(given), value_of(node)
        if isinstance(x, Tensor) and isinstance(known, Tensor) and x.dtype != known.dtype:
            raise MXError(f"the input {node.target!r} is of {x.dtype}, but the model was exported for {known.dtype}")


def _is_product(node: Node) -> bool:
    return is_ours(node) and node.target not in _NODES


def _check_operators(program: ExportedProgram) -> None:
    """Raise an MXError for what no node stands for, and for outputs that are no tensors."""
    for value in pytree.tree_leaves(program.graph.output_node().args):
        if not isinstance(value, Node) and value is not None:
            raise MXError(f"the output {value!r} is no tensor, and an ONNX file has no other outputs: leave it out")
    for graph in graph_modules(program.graph_module):
        for node in graph.graph.nodes:
            if _is_product(node):
                raise MXError(
                    f"{node.target} of {node.name!r} has no ONNX form: codes of activations are read where they are "
                    "dequantized alone, at the shape that was quantized"
                )
