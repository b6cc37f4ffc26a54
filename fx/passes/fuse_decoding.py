"""Fuse the norms, residual sums and gates of a decoder's step into its linear layers.

The pass is for steps of single tokens, where x has a few rows. For prompts, the kernels between the matmuls take little
of the time.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    LinearMXMMALayout,
    NormedLinearMX,
    ResidualLinearMX,
    args_of,
    dtype_of,
    function_of,
    insert_before,
    insert_call,
    name_of,
    named_args,
    node_arg,
    shape_of,
)
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.fx.passes.interleave_gates import gate_of, interleaved_halves
from pt2mx.ops.linear import linear_mx_mma_layout

aten = torch.ops.aten

#: most rows of x for which the fused operators are meant
MOST_FUSED_ROWS = 8


class Norm(NamedTuple):
    """RMSNorm of a residual sum."""

    node: Node
    total: Node
    weight: Node
    eps: float


@graph_pass(linear_mx_mma_layout)
def fuse_decoding(model: GraphModule) -> None:
    """Replace linear layers with weights in the MMA layout, with their norms, residual sums and gates, by
    `normed_linear_mx` and `residual_linear_mx`.

    The layer before a norm computes the residual sum and its squares. The layers after the norm divide by the root mean
    square; nothing else may read the norm. The pass skips norms of other forms, layers that rotate x, and tensors that
    the graph writes.
    """
    graph = model.graph
    _remove_idle(graph)
    written = written_nodes(graph)
    for node in graph.find_nodes(op="call_function", target=aten.unflatten.int):
        _fuse_gate(node, written)
    norms = [norm for node in graph.nodes if (norm := _norm_of(node)) is not None]
    for norm in norms:
        _fuse_norm(norm, written)


def _remove_idle(graph: Graph) -> None:
    """Erase checks of types, and dropout outside of training."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten.dropout.default):
        if args_of(node)[2] is False:
            node.replace_all_uses_with(node_arg(node))
            graph.erase_node(node)


def _fuse_gate(pairs: Node, written: set[Node]) -> None:
    """Fuse an MLP's activation and its product, where `interleave_gates` interleaved the weight."""
    linear, halves = node_arg(pairs), interleaved_halves(pairs)
    call = LinearMXMMALayout.of(linear)
    if call is None or call.rotation or not halves or len(linear.users) > 1:
        return
    if not written.isdisjoint((linear, *linear.all_input_nodes, *halves)):
        return
    if (gated := gate_of(halves[0], halves[1])) is not None:
        gate, product = gated
        replace_node(product, _normed(product, call, call.x, None, 0.0, gate), "val")


def _fuse_norm(norm: Norm, written: set[Node]) -> None:
    """Divide a norm between the layers before and after it."""
    terms = norm.total.all_input_nodes
    layers = [(node, call) for node in terms if (call := LinearMXMMALayout.of(node)) is not None]
    paths = _paths_to_layers(norm.node)
    if not layers or not paths:
        return
    before, call = layers[-1]
    if not written.isdisjoint((norm.total, norm.node, norm.weight, *terms, *before.all_input_nodes)):
        return
    residual = next(node for node in terms if node is not before)
    if (
        call.rotation
        or len(before.users) > 1
        or shape_of(residual) != shape_of(before)
        or dtype_of(residual) != torch.bfloat16
    ):
        return
    weight = _read_again(norm.total, norm.weight)
    fused = insert_call(norm.total, call.as_call_of(ResidualLinearMX, residual=residual, norm_weight=weight))
    total, weighted, squares = (insert_before(norm.total, operator.getitem, fused, i) for i in range(3))
    replace_node(norm.total, total, "val")
    for *path, layer in paths:
        x, of_x = weighted, squares
        for node in path:
            x, of_x = (_same_rows(layer, node, tensor) for tensor in (x, of_x))
        reader = LinearMXMMALayout.of(layer) or NormedLinearMX.expect(layer)
        replace_node(layer, _normed(layer, reader, x, of_x, norm.eps, getattr(reader, "gate", None)), "val")


def _normed(
    position: Node,
    call: LinearMXMMALayout | NormedLinearMX,
    x: Node,
    squares: Node | None,
    eps: float,
    gate: str | None,
) -> Node:
    return insert_call(position, call.as_call_of(NormedLinearMX, x=x, squares=squares, eps=eps, gate=gate))


def _read_again(position: Node, read: Node) -> Node:
    with position.graph.inserting_before(position):
        node = position.graph.get_attr(name_of(read))
    node.meta.update(read.meta)
    return node


def _paths_to_layers(node: Node) -> list[list[Node]]:
    """Return the nodes from a norm to each layer that reads it, which may select rows; empty if anything else reads
    it."""
    paths: list[list[Node]] = []
    for user in node.users:
        plain, normed = LinearMXMMALayout.of(user), NormedLinearMX.of(user)
        if (plain and not plain.rotation) or (normed and normed.squares is None):
            paths.append([user])
        elif _selects_rows(user) and (further := _paths_to_layers(user)):
            paths += [[user, *path] for path in further]
        else:
            return []
    return paths


def _selects_rows(node: Node) -> bool:
    dims = len(shape_of(node) or ())
    if node.target is aten.slice.Tensor:
        return named_args(node)["dim"] not in (-1, dims - 1)
    return node.target is aten.index.Tensor and len(args_of(node)[1]) < dims


def _same_rows(position: Node, node: Node, tensor: Node) -> Node:
    """Select the same rows of another tensor."""
    return insert_before(position, function_of(node), tensor, *list(named_args(node).values())[1:])


# --- the forms of RMSNorm ---


def _norm_of(node: Node) -> Norm | None:
    """Return the norm that a node completes, of a sum of two bfloat16 tensors; None for another node."""
    norm = _written_out(node) if node.target is aten.mul.Tensor else _one_call(node)
    if norm is None or norm.total.target is not aten.add.Tensor or norm.total.kwargs:
        return None
    is_bfloat16 = all(dtype_of(n) == torch.bfloat16 for n in (node, norm.total, norm.weight))
    is_row = shape_of(norm.weight) == (shape_of(norm.total) or ())[-1:]
    return norm if is_bfloat16 and is_row and len(norm.total.all_input_nodes) == 2 else None


def _one_call(node: Node) -> Norm | None:
    if node.target is not aten.rms_norm.default or len(node.args) < 4 or len(args_of(node)[1]) != 1:
        return None
    x, _, weight, eps = args_of(node)
    return Norm(node, x, weight, eps) if weight is not None and eps is not None and weight.op == "get_attr" else None


def _written_out(node: Node) -> Norm | None:
    """weight * (x32 * rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)"""
    weight = next((n for n in node.all_input_nodes if n.op == "get_attr"), None)
    cast = next((n for n in node.all_input_nodes if n.target is aten.to.dtype), None)
    if weight is None or cast is None or not _is_call(node_arg(cast), aten.mul.Tensor):
        return None
    factors = node_arg(cast).all_input_nodes
    inverse = next((n for n in factors if n.target is aten.rsqrt.default), None)
    x32 = next((n for n in factors if n.target is aten.to.dtype and args_of(n)[1] == torch.float32), None)
    if inverse is None or x32 is None or not _is_call(node_arg(inverse), aten.add.Tensor):
        return None
    mean, eps = args_of(node_arg(inverse))
    if not isinstance(eps, float) or not _is_call(mean, aten.mean.dim) or mean.args[1:] != ([-1], True):
        return None
    power = node_arg(mean)
    is_norm = _is_call(power, aten.pow.Tensor_Scalar) and power.args == (x32, 2)
    return Norm(node, node_arg(x32), weight, eps) if is_norm else None


def _is_call(node: object, target: object) -> bool:
    return isinstance(node, Node) and node.target is target
