"""Interleave the rows of a gated MLP's weight: 8 of the gate and 8 of the values (the up projection), in turns.

A tile of a weight in the MMA layout has 16 rows. A program of `normed_linear_mx` then has a gate and its values, and
multiplies them (`pt2mx.fx.passes.fuse_decoding`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    LinearMX,
    args_of,
    insert_before,
    name_of,
    named_args,
    read_instead,
    register_buffer,
    shape_of,
    tensor_of,
)
from pt2mx.fx.graph.tensors import erase_unused, replace_node
from pt2mx.fx.passes.weight_layout import has_mma_layout
from pt2mx.kernels.decoder_linear import GATE_ROWS, interleave

aten = torch.ops.aten

#: activation of a gate -> its name, by the arguments of a call
_ACTIVATIONS: dict[object, Callable[[Node], str | None]] = {
    aten.silu.default: lambda node: "silu",
    aten.gelu.default: lambda node: "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else None,
}


@graph_pass(LinearMX)
def interleave_gates(model: GraphModule) -> None:
    """Interleave the rows of each weight whose result is split into halves, one of which gates the other.

    The pass skips weights that will not have the MMA layout (on other devices), weights that
    something else uses, computed biases, halves whose rows 8 does not divide, and results that the graph writes.
    """
    written, constants = written_nodes(model.graph), constant_nodes(model.graph)
    for node, call in LinearMX.calls_in(model.graph):
        halves = _halves(node)
        read = [n for n in (call.codes, call.scale, call.bias) if n is not None]
        if not halves or not has_mma_layout(model, call, constants):
            continue
        if any(len(n.users) > 1 or n.op != "get_attr" or n not in constants for n in read):
            continue
        rows = len(tensor_of(model, call.codes))
        is_gated = gate_of(*halves) or gate_of(*reversed(halves))
        if is_gated and rows % (2 * GATE_ROWS) == 0 and written.isdisjoint((node, *halves)):
            _interleave(model, node, read, halves, gate_of(*halves) is not None, rows)


def gate_of(gate: Node, values: Node) -> tuple[str, Node] | None:
    """Return the name of the activation of `gate`, and the product of it and `values`; None for other nodes."""
    if len(gate.users) != 1 or len(values.users) != 1:
        return None
    activation, product = next(iter(gate.users)), next(iter(values.users))
    name = _ACTIVATIONS.get(activation.target, lambda node: None)(activation)
    is_product = product.target is aten.mul.Tensor and set(product.all_input_nodes) == {activation, values}
    return (name, product) if name and is_product and len(activation.users) == 1 else None


def _halves(node: Node) -> list[Node]:
    """Return the two halves of a result along its last dimension; an empty list if it has other users."""
    shape, users = shape_of(node) or (0,), list(node.users)
    last = (-1, len(shape) - 1)
    whole = [(2, dim) for dim in last]
    if len(users) == 1 and users[0].target is aten.chunk.default and args_of(users[0])[1:] in whole:
        users = list(users[0].users)
        parts = {args_of(part)[1]: part for part in users}
    elif len(users) == 2 and all(user.target is aten.slice.Tensor for user in users) and isinstance(shape[-1], int):
        parts = {_half_of_slice(user, last, shape[-1]): user for user in users}
    else:
        return []
    return [parts[0], parts[1]] if set(parts) == {0, 1} and len(users) == 2 else []


def _half_of_slice(node: Node, last: tuple[int, int], n: int) -> int | None:
    """Return which half of the n columns a slice is, 0 or 1; None for another slice. last: the last dimension."""
    _, dim, start, end, step = named_args(node).values()
    is_whole = dim in last and step == 1 and all(isinstance(at, int | None) for at in (start, end))
    bounds = (start or 0, n if end is None else min(end, n)) if is_whole else None
    return {(0, n // 2): 0, (n // 2, n): 1}.get(bounds)  # type: ignore[arg-type]


def _interleave(
    model: GraphModule, node: Node, read: list[Node], halves: list[Node], gate_first: bool, rows: int
) -> None:
    def reordered(rows_of: Tensor) -> Tensor:
        return interleave(rows_of if gate_first else torch.cat(rows_of.chunk(2)[::-1]))

    for old in read:
        with model.graph.inserting_before(old):
            value = reordered(tensor_of(model, old))
            new = read_instead(model, register_buffer(model, f"{name_of(old)}_gated", value), old)
        node.replace_input_with(old, new)
        erase_unused(old)
    first = node.next
    pairs = insert_before(first, aten.unflatten.int, node, -1, [rows // (2 * GATE_ROWS), 2, GATE_ROWS])
    parts = [insert_before(first, aten.select.int, pairs, -2, index) for index in ((0, 1) if gate_first else (1, 0))]
    columns = [insert_before(first, aten.flatten.using_ints, part, -2, -1) for part in parts]
    for half, of_half in zip(halves, columns, strict=True):
        replace_node(half, of_half, "val")


def interleaved_halves(pairs: Node) -> list[Node]:
    """Return the columns of the gate and of the values that `interleave_gates` took out of the result of an unflatten;
    an empty list for another unflatten."""
    _, dim, sizes = named_args(pairs).values()
    parts = {part.args[1:]: list(part.users) for part in pairs.users if part.target is aten.select.int}
    halves = [node for index in range(2) for node in parts.get((-2, index), [])]
    is_ours = dim == -1 and list(sizes[1:]) == [2, GATE_ROWS] and len(parts) == len(pairs.users) == len(halves) == 2
    flattens = all(half.target is aten.flatten.using_ints and half.args[1:] == (-2, -1) for half in halves)
    return halves if is_ours and flattens else []
