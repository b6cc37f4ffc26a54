"""Running a graph node by node, the graphs inside it too, with an eye on each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Interpreter, Node, map_arg
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.attributes import attribute_of
from pt2mx.fx.graph.source_node import nodes_by_source, source_name
from pt2mx.fx.graph.tensors import tensors_in_written_memory
from pt2mx.pt2e.debug.batches import copied, errors_of_running, leaves_of

#: is shown a value: its key (the place of its graph and its origin), its node, the value, and the run
Seen = Callable[[str, Node, Any, "Watched"], None]


class Watched(Interpreter):
    """A run of a graph that shows the value of each origin, those of the graphs inside with their place before it.

    Args:
        model: the graph.
        seen: is shown each value.
        place: that of the graph: "" or the origins of the calls that lead to it, each ending in "/".
    """

    def __init__(self, model: GraphModule, seen: Seen, place: str = "") -> None:
        super().__init__(model, garbage_collect_values=False)
        self.model, self.seen, self.place = model, seen, place
        self.outputs: Any = None
        #: the value of each node when it was computed; `env` shows what later nodes wrote to it
        self.values: dict[Node, Any] = {}
        self._written = written_nodes(model.graph)
        self.keys = {node: place + name for name, node in nodes_by_source(model.graph).items()}

    def run_node(self, node: Node) -> Any:
        """Run a node, the graphs that it takes watched, and show its value."""
        with self._watched_graphs(node):
            value = self.computed(node)
        self.values[node] = pytree.tree_map_only(Tensor, Tensor.clone, value) if node in self._written else value
        if node in self.keys:
            self.seen(self.keys[node], node, self.values[node], self)
        return value

    def computed(self, node: Node) -> Any:
        """The value of a node."""
        return super().run_node(node)

    def cone(self, node: Node, known: Mapping[str, Any]) -> list[Node]:
        """The nodes, in order, that compute a node from the values that are `known` by key."""
        inside, left = set(), [node]
        while left:
            one = left.pop()
            inside.add(one)
            left += [n for n in one.all_input_nodes if n not in inside and not self._is_given(n, known)]
        return [one for one in self.model.graph.nodes if one in inside]

    def again(self, node: Node, known: Mapping[str, Any]) -> Any:
        """The value of a node that was run, once more, from the values that are `known` by key."""
        values: dict[Node, Any] = {}

        def value(one: Node) -> Any:
            if one not in values:
                values[one] = self.given(one, known)
                if one in self._written:
                    values[one] = pytree.tree_map_only(Tensor, Tensor.clone, values[one])
            return values[one]

        for one in self.cone(node, known):
            args, kwargs = map_arg((one.args, one.kwargs), value)
            values[one] = getattr(self, one.op)(one.target, args, kwargs)
        return values[node]

    def given(self, node: Node, known: Mapping[str, Any]) -> Any:
        """The value of a node outside of a cone."""
        key = self.keys.get(node)
        return self.values[node] if key is None or key not in known else known[key]

    def _is_given(self, node: Node, known: Mapping[str, Any]) -> bool:
        return node.op in ("placeholder", "get_attr") or self.keys.get(node) in known

    def inside(self, graph: GraphModule, place: str) -> Watched:
        """The run of a graph that a node of this one is given."""
        return Watched(graph, self.seen, place)

    @contextmanager
    def _watched_graphs(self, node: Node) -> Iterator[None]:
        """Have the graphs that a node is given run as this one does."""
        with ExitStack() as stack:
            for place, graph in graphs_at(self.model, node, self.place):
                graph.forward = partial(self.inside(graph, place).run, enable_io_processing=False)
                stack.callback(delattr, graph, "forward")
            yield


def graphs_at(model: GraphModule, node: Node, place: str) -> list[tuple[str, GraphModule]]:
    """(place, graph) of what a node of a graph at a place is given to call."""
    readers = [one for one in node.all_input_nodes if one.op == "get_attr"]
    graphs = [graph for one in readers if isinstance(graph := attribute_of(model, one), GraphModule)]
    return [(f"{place}{source_name(node)}.{i}/", graph) for i, graph in enumerate(graphs)]


def keyed_nodes(model: GraphModule, place: str = "") -> Iterator[tuple[str, Node, GraphModule]]:
    """(key, node, its graph) of all that a run shows, in the graphs inside too."""
    for name, node in nodes_by_source(model.graph).items():
        yield place + name, node, model
    for node in model.graph.nodes:
        for inner, graph in graphs_at(model, node, place):
            yield from keyed_nodes(graph, inner)


def is_tuple_of_operator(node: Node, value: Any) -> bool:
    """True of an operator with several outputs, such as an LSTM; not of a condition or a loop, which is made of others
    that are seen themselves."""
    return isinstance(value, tuple | list) and not isinstance(node.target, HigherOrderOperator)


def run(model: GraphModule, batch: Any, seen: Seen = lambda key, node, value, watched: None) -> Watched:
    """Run a model with a batch, and show `seen` each value. Gives the run: `env` has the values, `outputs` the last.

    Raises:
        MXError: for a batch that the model does not take.
    """
    leaves = copied(leaves_of(model, batch))
    watched = Watched(model, seen)
    with errors_of_running(leaves):
        watched.outputs = watched.run(*leaves, enable_io_processing=False)
    return watched


@contextmanager
def unchanged(*models: object) -> Iterator[None]:
    """Give the buffers that graphs write (a cache, a counter) their values back when the block ends."""
    graphs = [one for one in models if isinstance(one, GraphModule)]
    held = [tensor for graph in graphs for tensor in tensors_in_written_memory(graph).values()]
    before = [tensor.clone() for tensor in held]
    try:
        yield
    finally:
        for tensor, values in zip(held, before, strict=True):
            tensor.copy_(values)


def check_module(model: object, what: str) -> GraphModule:
    """The model, an `MXError` where it is no graph."""
    if not isinstance(model, GraphModule):
        kind = "a module" if isinstance(model, nn.Module) else f"of type {type(model).__name__}"
        raise MXError(f"{what} must be a GraphModule, and is {kind}: pass torch.export.export(...).module()")
    return model
