"""Run a graph node by node, including its subgraphs, and record every intermediate value."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node, map_arg

from pt2mx.analysis.agreement import comparable
from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import attribute_of
from pt2mx.fx.graph.source_node import nodes_by_source, source_name
from pt2mx.fx.graph.tensors import tensors_in_written_memory
from pt2mx.pt2e.debug.batches import copied, errors_of_running, leaves_of

#: called with each value: its key (the path of its graph and its source node), its node, the value, and the run
OnValue = Callable[[str, Node, Any, "RecordingInterpreter"], None]


class RecordingInterpreter(Interpreter):
    """Runs a graph and records the value of each source node.

    Args:
        model: the graph.
        on_value: called with each value.
        path: the path of the graph: "", or the source nodes of the calls that lead to it, each followed by "/".
    """

    def __init__(self, model: GraphModule, on_value: OnValue, path: str = "") -> None:
        super().__init__(model, garbage_collect_values=False)
        self.model, self.on_value, self.path = model, on_value, path
        self.outputs: Any = None
        #: the value of each node when it was computed; in `env` later nodes may have written to it
        self.values: dict[Node, Any] = {}
        self._written = written_nodes(model.graph)
        self.keys = {node: path + name for name, node in nodes_by_source(model.graph).items()}

    def run_node(self, node: Node) -> Any:
        """Run a node, and its subgraphs by interpreters of their own, and record its value."""
        with self._interpreted_subgraphs(node):
            value = self.computed(node)
        self.values[node] = copied(value) if node in self._written else value
        if node in self.keys:
            self.on_value(self.keys[node], node, self.values[node], self)
        return value

    def computed(self, node: Node) -> Any:
        """Return the value of a node."""
        return super().run_node(node)

    def cone(self, node: Node, known: Mapping[str, Any]) -> list[Node]:
        """Return the nodes, in order, that compute a node from the values that are `known` by key."""
        cone, pending = set(), [node]
        while pending:
            current = pending.pop()
            cone.add(current)
            pending += [n for n in current.all_input_nodes if n not in cone and not self._is_cone_input(n, known)]
        return [n for n in self.model.graph.nodes if n in cone]

    def recomputed(self, node: Node, known: Mapping[str, Any]) -> Any:
        """Compute a node again from the values that are `known` by key."""
        values: dict[Node, Any] = {}

        def value(n: Node) -> Any:
            if n not in values:
                taken = self.cone_input(n, known)
                values[n] = copied(taken) if n in self._written else taken
            return values[n]

        for n in self.cone(node, known):
            args, kwargs = map_arg((n.args, n.kwargs), value)
            values[n] = getattr(self, n.op)(n.target, args, kwargs)
        return values[node]

    def cone_input(self, node: Node, known: Mapping[str, Any]) -> Any:
        """Return the value of a node that a cone takes as an input."""
        key = self.keys.get(node, "")
        return known[key] if key in known else self.values[node]

    def _is_cone_input(self, node: Node, known: Mapping[str, Any]) -> bool:
        return node.op in ("placeholder", "get_attr") or self.keys.get(node) in known

    def of_subgraph(self, subgraph: GraphModule, path: str) -> RecordingInterpreter:
        """Return the interpreter of a subgraph."""
        return RecordingInterpreter(subgraph, self.on_value, path)

    @contextmanager
    def _interpreted_subgraphs(self, node: Node) -> Iterator[None]:
        """Run the subgraphs of a node by interpreters within the block."""
        with ExitStack() as stack:
            for path, subgraph in subgraphs_of(self.model, node, self.path):
                subgraph.forward = partial(self.of_subgraph(subgraph, path).run, enable_io_processing=False)
                stack.callback(delattr, subgraph, "forward")
            yield


def subgraphs_of(model: GraphModule, node: Node, path: str) -> list[tuple[str, GraphModule]]:
    """Return the subgraphs that a node of the graph at `path` calls, each as (path, subgraph)."""
    subgraphs: list[tuple[str, GraphModule]] = []
    for n in node.all_input_nodes:
        subgraph = attribute_of(model, n) if n.op == "get_attr" else None
        if isinstance(subgraph, GraphModule):
            subgraphs.append((f"{path}{source_name(node)}.{len(subgraphs)}/", subgraph))
    return subgraphs


def keyed_nodes(model: GraphModule, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield (key, node) of every value that a run records, including subgraphs."""
    for name, node in nodes_by_source(model.graph).items():
        yield path + name, node
    for node in model.graph.nodes:
        for inner_path, subgraph in subgraphs_of(model, node, path):
            yield from keyed_nodes(subgraph, inner_path)


def is_tuple_of_operator(node: Node, value: Any) -> bool:
    """Return whether a value is the tuple of an operator with several outputs, such as an LSTM.

    A condition or a loop does not count: the operators in it are recorded themselves.
    """
    return isinstance(value, tuple | list) and not isinstance(node.target, HigherOrderOperator)


def run(
    model: GraphModule, batch: Any, on_value: OnValue = lambda key, node, value, interpreter: None
) -> RecordingInterpreter:
    """Run a model with a batch and record its values. Return the interpreter, with `values` and `outputs`.

    Raises:
        MXError: for a batch that the model does not take.
    """
    leaves = copied(leaves_of(model, batch))
    interpreter = RecordingInterpreter(model, on_value)
    with errors_of_running(leaves):
        interpreter.outputs = interpreter.run(*leaves, enable_io_processing=False)
    return interpreter


@dataclass
class Pair:
    """A floating tensor of a run, and the value of a reference for the same source node and call, `want`.

    `known` holds the latest value of the reference by key.
    """

    key: str
    node: Node
    value: Tensor
    want: Tensor
    known: dict[str, Any]
    interpreter: RecordingInterpreter

    def recomputed(self) -> Any:
        """Compute the value again from the reference's values."""
        return self.interpreter.recomputed(self.node, self.known)


def run_against(
    reference: Mapping[str, Iterable[Any]], model: GraphModule, batch: Any, on_pair: Callable[[Pair], None]
) -> RecordingInterpreter:
    """Run a model as `run` does, and call `on_pair` with each value that has one in the reference, but inputs.

    Args:
        reference: key -> its values in the order of the calls; an operator in a loop has several.
    """
    pending = {key: deque(values) for key, values in reference.items()}
    known: dict[str, Any] = {}

    def compare(key: str, node: Node, value: Any, interpreter: RecordingInterpreter) -> None:
        if not pending.get(key):
            return
        want = pending[key].popleft()
        if is_tuple_of_operator(node, want):
            return  # its items are compared instead, and recomputed from the operator's inputs
        known[key] = want
        if node.op != "placeholder" and comparable(value, want):
            on_pair(Pair(key, node, value, want, known, interpreter))

    return run(model, batch, compare)


@contextmanager
def unchanged(*models: object) -> Iterator[None]:
    """Restore the buffers that graphs write (a cache, a counter) when the block ends."""
    buffers: list[Tensor] = []
    for model in models:
        if isinstance(model, GraphModule):
            buffers += tensors_in_written_memory(model).values()
    before = [tensor.clone() for tensor in buffers]
    try:
        yield
    finally:
        for tensor, values in zip(buffers, before, strict=True):
            tensor.copy_(values)


def check_module(model: object, what: str) -> GraphModule:
    """Return the graph module of a model or an exported program; raise an MXError for another object."""
    if isinstance(model, ExportedProgram):
        model = model.module()
    if not isinstance(model, GraphModule):
        kind = "a module" if isinstance(model, nn.Module) else f"of type {type(model).__name__}"
        raise MXError(f"{what} must be a GraphModule, and is {kind}: pass torch.export.export(...).module()")
    return model
