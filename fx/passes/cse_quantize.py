"""Equal quantizations of one tensor are done once: the inputs of the query, key and value projections."""

import operator

from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import Dequantize, FakeQuantize, Quantize
from pt2mx.modes import ROUNDINGS

_SHARED = (ops.quantize_mx, ops.fake_quantize_mx, ops.dequantize_mx)


@GraphPass
def cse_quantize(model: GraphModule) -> None:
    """Let the readers of equal quantizations of one tensor read the first.

    Stochastic ones stay apart, unless they have a seed: each draws its own numbers. So do those of memory that the
    graph writes.
    """
    written, first = written_nodes(model.graph), {}
    for node in list(model.graph.nodes):
        if not _is_shared(node) or not written.isdisjoint((node, *node.all_input_nodes)):
            continue
        kept = first.setdefault(repr((node.target, _arguments(model, node))), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            model.graph.erase_node(node)


def _is_shared(node: Node) -> bool:
    if node.target is operator.getitem:
        return node.args[0].target is ops.quantize_mx
    if node.target not in _SHARED:
        return False
    of = Quantize.of(node) or FakeQuantize.of(node)
    return of is None or not (ROUNDINGS[of.rounding].random and of.seed is None)


def _arguments(model: GraphModule, node: Node) -> object:
    """The arguments of a node, parameters and buffers by what they hold: a tied weight has two names."""
    call = Quantize.of(node) or FakeQuantize.of(node) or Dequantize.of(node) or node.args

    def key(n: Node) -> object:
        return id(operator.attrgetter(n.target)(model)) if n.op == "get_attr" else n.name

    return [key(a) if isinstance(a, Node) else a for a in call]
