"""A model's graph as rows that a page can draw, and the nodes in it for the operators of a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import getitem
from typing import NamedTuple

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.higher_order_ops import named_graph_modules
from pt2mx.fx.graph.node import value_of
from pt2mx.fx.graph.source_node import module_name, nodes_by_source, source_name
from pt2mx.pt2e.debug.interpreter import check_module
from pt2mx.pt2e.debug.print_graph import format_text, operator_text, shape_text


class GraphRow(NamedTuple):
    """A node; `inputs` are indices of rows."""

    name: str
    operator: str
    shape: str
    format: str
    module: str
    inputs: list[int]


@dataclass(frozen=True)
class DrawnGraph:
    """The rows of a model's graph and its subgraphs. Tuple items are left out: their users read the tuple.

    Names in a subgraph start with its path.

    Args:
        named: name of a node -> index of its row.
        by_source: the node's name in the first export -> index of its row.
        sources: name of a node -> its name in the first export.
    """

    rows: list[GraphRow]
    named: dict[str, int]
    by_source: dict[str, int]
    sources: dict[str, str]

    @classmethod
    def of(cls, model: GraphModule | ExportedProgram, name: str) -> DrawnGraph:
        """Return the graph of a model; errors call it `name`."""
        drawn = cls([], {}, {}, {})
        graph = check_module(model, name)
        for path, inner in named_graph_modules(graph):
            drawn._add(f"{path}." if path else "", inner)
        return drawn

    def _add(self, path: str, model: GraphModule) -> None:
        numbers: dict[Node, int] = {}
        for node in model.graph.nodes:
            if node.target is getitem and node.all_input_nodes[0] in numbers:
                numbers[node] = numbers[node.all_input_nodes[0]]
                continue
            if node.op != "output" and not node.users and value_of(node) is None:  # guards and assertions
                continue
            inputs = list(dict.fromkeys(numbers[one] for one in node.all_input_nodes if one in numbers))
            texts = operator_text(node), shape_text(node), format_text(node), module_name(node)
            numbers[node] = self.named[path + node.name] = len(self.rows)
            self.sources[path + node.name] = path + source_name(node)
            self.rows.append(GraphRow(path + node.name, *texts, inputs))
        made = nodes_by_source(model.graph).items()
        self.by_source.update({path + name: numbers[node] for name, node in made if node in numbers})


def node_positions(
    names: Iterable[str], before: DrawnGraph | None, after: DrawnGraph | None
) -> list[tuple[int | None, int | None]]:
    """Return the rows, before and after, of the operators that a report names."""
    positions = []
    for name in names:
        first = after.sources.get(name, name) if after else name
        earlier = before.by_source.get(first, before.named.get(name)) if before else None
        later = after.named.get(name, after.by_source.get(name)) if after else None
        positions.append((earlier, later))
    return positions
