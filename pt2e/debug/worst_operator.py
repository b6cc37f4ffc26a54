"""The operator whose two forms differ most, both given the inputs that it has in the first."""

from __future__ import annotations

from collections import defaultdict, deque
from operator import getitem
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.source_node import nodes_by_source
from pt2mx.pt2e.debug.batches import named_leaves
from pt2mx.pt2e.debug.differences import comparable, relative_error
from pt2mx.pt2e.debug.onnx_stage import OnnxStage
from pt2mx.pt2e.debug.pieces import piece_of
from pt2mx.pt2e.debug.watched import Watched, is_tuple_of_operator, run


class Found(NamedTuple):
    """Nodes whose two forms differ by an error, and what a file holds of them."""

    nodes: list[Node]
    error: float
    content: dict[str, Any]


def worst_operator(first: GraphModule, second: GraphModule, batch: Any) -> Found:
    """The operator of the largest error, both given the inputs that it has in `first`.

    Raises:
        MXError: where no value of the two can be compared.
    """
    nodes: dict[str, tuple[Node, Watched]] = {}
    values: dict[str, deque[Any]] = defaultdict(deque)
    known: dict[str, Any] = {}
    found: list[Found] = []

    def seen_first(key: str, node: Node, value: Any, watched: Watched) -> None:
        nodes[key] = node, watched
        values[key].append(value)

    def seen_second(key: str, node: Node, value: Any, watched: Watched) -> None:
        if not values.get(key):
            return
        want = values[key].popleft()
        if is_tuple_of_operator(node, want):
            return  # its items are compared
        known[key] = want
        if node.op == "placeholder" or not comparable(value, want):
            return
        error = relative_error(watched.again(node, known), want)
        if not found or error > found[0].error:
            first_nodes, content = _first_piece(*nodes[key])
            other, other_inputs = piece_of(watched.model, watched.cone(node, known))
            given = [watched.given(n, known) for n in other_inputs]
            content |= {"second": other, "second_inputs": given}
            found[:] = [Found(first_nodes, error, content)]

    run(first, batch, seen_first)
    run(second, batch, seen_second)
    if not found:
        raise MXError("the two graphs share no operator: give forms of one export")
    return found[0]


def worst_in_file(first: GraphModule, file: OnnxStage, batch: Any) -> Found | None:
    """The operator of the largest error in an ONNX file, given the inputs that it has in `first`."""
    whole = run(first, batch)
    values = {key: whole.values[node] for key, node in nodes_by_source(first.graph).items()}
    known = {key: value for key, value in values.items() if comparable(value, value)}
    _, isolated, _ = file.run(named_leaves(first, batch), known)
    errors = {key: relative_error(value.to(known[key].device), known[key]) for key, value in isolated.items()}
    if not errors:
        raise MXError(f"the stage {file.name!r} shares no operator with the graph: give a file of the same export")
    worst = max(errors, key=errors.__getitem__)
    nodes, content = _first_piece(nodes_by_source(first.graph)[worst], whole)
    return Found(nodes, errors[worst], {**content, "outputs": isolated[worst]})


def _first_piece(node: Node, whole: Watched) -> tuple[list[Node], dict[str, Any]]:
    """An operator of the first form, before an item of its outputs, and what a file holds of them."""
    nodes = [*(node.all_input_nodes if node.target is getitem else []), node]
    module, inputs = piece_of(whole.model, nodes)
    given = [whole.values[one] for one in inputs]
    return nodes, {
        "first": module,
        "inputs": given,
        "second": None,
        "second_inputs": given,
        "form": None,
        "outputs": None,
    }
