"""The weights of a prepared model that are sliced from an anchor: find them, and check that their formats fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.constants import root_name
from pt2mx.fx.graph.higher_order_ops import captured_operands, graph_modules
from pt2mx.fx.graph.node import name_of, node_arg
from pt2mx.pt2e.observer import MXObserver
from pt2mx.pt2e.report.weights import constants_of, is_constant
from pt2mx.spec import MXSpec


def check_narrower(name: str, spec: MXSpec, anchor: MXSpec) -> None:
    """Raise an MXError unless a weight in the format `anchor` can be sliced to `spec`."""
    if spec.element.bits > anchor.element.bits:
        raise MXError(
            f"{name} is {anchor.element.name}, and the recipe's {spec.element.name} is wider: give a recipe of at most "
            f"{anchor.element.bits} bits, or quantize the float model with this one"
        )
    if (spec.block_size, spec.block_rows) != (anchor.block_size, anchor.block_rows):
        raise MXError(
            f"{name} has blocks of {_blocks(anchor)}, and the recipe blocks of {_blocks(spec)}: slicing keeps blocks, "
            f"so give a recipe with blocks of {_blocks(anchor)}"
        )


def observed_weights(prepared: GraphModule) -> Iterator[tuple[MXObserver, set[str]]]:
    """Yield the observers of the constants of a prepared model, each with the names of the parameters that it observes:
    one, or in a subgraph one for each call."""
    captured = captured_operands(prepared)
    for graph in graph_modules(prepared):
        constants = constants_of(graph)
        for node in graph.graph.find_nodes(op="call_module"):
            observer = graph.get_submodule(name_of(node))
            if isinstance(observer, MXObserver) and is_constant(node_arg(node), constants):
                yield observer, _parameters(node_arg(node), captured)


def _parameters(node: Node, captured: Mapping[Node, list[object]]) -> set[str]:
    """Return the names of the first parameters from which the values of a constant are computed."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
    roots = captured.get(node, [node])
    return {root_name(root) for root in roots if isinstance(root, Node)}


def _blocks(spec: MXSpec) -> str:
    return str(spec.block_size) if spec.block_rows == 1 else f"{spec.block_rows}x{spec.block_size}"
