"""Export a converted program again after graph passes, for programs in other operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.graph_pass import GraphPass, run_passes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.qdq import unlike_converted
from pt2mx.fx.graph.tensors import (
    copy_sharing_tensors,
    delete_unused_tensors,
    map_tensors,
    without_torch_warnings,
)
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.passes.fuse_qdq import cse_quantize, fuse_qdq, merge_fake_quantize
from pt2mx.fx.passes.packed_operands import use_packed_embeddings
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.program.sizes import dynamic_shapes

#: one operator for each quantized tensor; embeddings decode only the rows that they look up
PASSES = (cse_quantize, fuse_qdq, use_packed_embeddings, merge_fake_quantize)


def check_converted(program: object) -> None:
    """Raise an MXError for what is no program of a converted model."""
    if not isinstance(program, ExportedProgram):
        raise MXError(
            f"expected an ExportedProgram, not {type(program).__name__}: pass torch.export.export(converted, inputs)"
        )
    if kind := unlike_converted(program.graph_module, program.state_dict):
        raise MXError(f"expected a converted program, not {kind}: pass torch.export.export(converted, inputs)")


def with_packed_weights(converted: GraphModule, passes: Iterable[GraphPass]) -> GraphModule:
    """Return a copy of a converted graph with packed weights, after passes over it and its subgraphs. It shares the
    tensors that stay."""
    graph = copy_sharing_tensors(converted)
    map_tensors(graph, Tensor.detach)
    fold_all_weights(graph)
    for each in graph_modules(graph):
        run_passes(each, passes)
    delete_unused_tensors(graph)
    return graph


def export_again(program: ExportedProgram, passes: Sequence[GraphPass] = ()) -> ExportedProgram:
    """Export a copy of a program again, with its sizes: weights are packed, and one operator computes each quantized
    tensor. `passes` run after that, on subgraphs too.

    Raises:
        MXError: for a program without example inputs, and where the export fails.
    """
    if program.example_inputs is None:
        raise MXError("the program has no example inputs, and is exported again with them: set program.example_inputs")
    graph = with_packed_weights(program.module(), (*PASSES, *passes))
    args, kwargs = program.example_inputs
    with torch.no_grad(), without_torch_warnings(), user_errors("export the program again"):
        return torch.export.export(graph, args, kwargs, dynamic_shapes=dynamic_shapes(program, graph))
