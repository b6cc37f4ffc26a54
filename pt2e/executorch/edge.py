"""Programs for ExecuTorch: core aten operators, packed weights as bytes, and no bit casts. Needs no executorch."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils._sympy.value_ranges import ValueRanges

from pt2mx.errors import MXError, check_integer
from pt2mx.fx.graph.graph_pass import run_passes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.qdq import unlike_converted
from pt2mx.fx.graph.tensors import copy_sharing_tensors, delete_unused_tensors, map_tensors
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.passes.fuse_qdq import cse_quantize, fuse_qdq, merge_fake_quantize
from pt2mx.fx.passes.packed_operands import use_packed_embeddings
from pt2mx.fx.portable import without_bit_casts
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.program.sizes import dynamic_shapes

aten = torch.ops.aten
#: operators that ExecuTorch's kernels have, although they are not core aten operators
BESIDE_CORE = (
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
)
_PASSES = (cse_quantize, fuse_qdq, use_packed_embeddings, merge_fake_quantize)


def edge_ready(program: ExportedProgram, max_size: int | None = None) -> ExportedProgram:
    """Return a program of core aten operators that gives the bits of a converted one.

    Weights are bytes, as they were packed; the graph decodes them. Embeddings decode only the rows that they look up.

    Args:
        program: `torch.export.export(converted, ...)`; it does not change.
        max_size: the upper bound of dynamic dimensions that have none; None leaves them without.

    Raises:
        MXError: for another object, for a program without quantized tensors, and for another `max_size`.
    """
    _check(program)
    if max_size is not None:
        program = _bounded(program, max_size)
    graph = copy_sharing_tensors(program.module())
    map_tensors(graph, Tensor.detach)
    fold_all_weights(graph)
    for each in graph_modules(graph):
        run_passes(each, _PASSES)
    delete_unused_tensors(graph)
    args, kwargs = program.example_inputs
    with torch.no_grad(), warnings.catch_warnings(), user_errors("export the program again"):
        # torch warns of its own code
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        again = torch.export.export(graph, args, kwargs, dynamic_shapes=dynamic_shapes(program, graph))
        return share_tables(without_bit_casts(again))


def _bounded(program: ExportedProgram, max_size: int) -> ExportedProgram:
    """Return the program with an upper bound for each of its dynamic dimensions; its graph is shared."""
    check_integer("max_size", max_size, 2)
    bounded = copy.copy(program)
    bounded._range_constraints = {
        symbol: bounds if bounds.upper.is_Integer else ValueRanges(bounds.lower, max_size)
        for symbol, bounds in program.range_constraints.items()
    }
    return bounded


def share_tables(program: ExportedProgram) -> ExportedProgram:
    """Replace equal values that a graph computes from no tensor by the first of them.

    Each weight decodes by a table of its own, the values of codes and the shifts of packed ones: about half of the
    nodes of a graph with FP4 weights. Changes `program` and returns it.
    """
    for model in graph_modules(program.graph_module):
        _share(model.graph)
        model.recompile()
    return program


def _share(graph: Graph) -> None:
    tables: set[Node] = set()
    first: dict[str, Node] = {}
    for node in list(graph.nodes):
        if not _is_deterministic(node) or not tables.issuperset(node.all_input_nodes):
            continue
        kept = first.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if kept is node:
            tables.add(node)
        else:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _is_deterministic(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def _check(program: object) -> None:
    if not isinstance(program, ExportedProgram):
        raise MXError(
            f"expected an ExportedProgram, not {type(program).__name__}: pass torch.export.export(converted, inputs)"
        )
    if kind := unlike_converted(program.graph_module, program.state_dict):
        raise MXError(f"expected a converted program, not {kind}: pass torch.export.export(converted, inputs)")
