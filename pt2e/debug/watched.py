"""Running a graph node by node, the graphs inside it too, with an eye on each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node, map_arg
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.origins import by_origin, origin

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
        self.keys = {node: place + name for name, node in by_origin(model.graph).items()}

    def run_node(self, node: Node) -> Any:
        """Run a node, the graphs that it takes watched, and show its value."""
        with self._watched_graphs(node):
            value = super().run_node(node)
        if node in self.keys:
            self.seen(self.keys[node], node, value, self)
        return value

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
            return values[one] if one in values else self.given(one, known)

        for one in self.cone(node, known):
            args, kwargs = map_arg((one.args, one.kwargs), value)
            values[one] = getattr(self, one.op)(one.target, args, kwargs)
        return values[node]

    def given(self, node: Node, known: Mapping[str, Any]) -> Any:
        """The value of a node outside of a cone."""
        key = self.keys.get(node)
        return self.env[node] if key is None or key not in known else known[key]

    def _is_given(self, node: Node, known: Mapping[str, Any]) -> bool:
        return node.op in ("placeholder", "get_attr") or self.keys.get(node) in known

    @contextmanager
    def _watched_graphs(self, node: Node) -> Iterator[None]:
        """Have the graphs that a node is given run as this one does."""
        graphs = [self.env[one] for one in node.all_input_nodes if isinstance(self.env.get(one), GraphModule)]
        with ExitStack() as stack:
            for i, graph in enumerate(graphs):
                run = Watched(graph, self.seen, f"{self.place}{origin(node)}.{i}/")
                graph.forward = partial(run.run, enable_io_processing=False)
                stack.callback(delattr, graph, "forward")
            yield


def leaves_of(model: GraphModule, batch: Any) -> list[Any]:
    """A batch (a tensor, a tuple of positional or a dict of keyword arguments) as the placeholders of a graph take it.

    Raises:
        MXError: for another number of arguments or other names than the model takes.
    """
    leaves = pytree.tree_leaves(_bound(model, batch))
    count = len(model.graph.find_nodes(op="placeholder"))
    if len(leaves) != count:
        raise MXError(f"the model takes {count} tensors and numbers, and a batch holds {len(leaves)}")
    return leaves


def _bound(model: GraphModule, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the keyword arguments of a call, as the graph was exported."""
    info = getattr(model.graph._codegen, "pytree_info", None)
    if info is None:
        names = positional = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    else:
        names = [name for name in info.orig_args if name != "self"]
        positional = names[: info.in_spec.child(0).num_children]
    if isinstance(batch, dict):
        given = batch
    else:
        values = batch if isinstance(batch, tuple | list) else (batch,)
        given = dict(zip(names, values, strict=False)) if len(values) <= len(names) else {}
    if set(given) != set(names):
        raise MXError(f"the model takes {', '.join(names)}: give each of them once, not {_what(batch)}")
    return [given[name] for name in positional], {name: given[name] for name in names[len(positional) :]}


def _what(batch: Any) -> str:
    if isinstance(batch, dict):
        return ", ".join(map(str, batch)) or "none"
    return f"{len(batch)} values" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"


def run(model: GraphModule, batch: Any, seen: Seen = lambda key, node, value, watched: None) -> Watched:
    """Run a model with a batch, and show `seen` each value. Gives the run: `env` has the values, `outputs` the last."""
    leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(model, batch)]
    watched = Watched(model, seen)
    watched.outputs = watched.run(*leaves, enable_io_processing=False)
    return watched


def call(form: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a copy of a batch: it may write to its inputs."""
    batch = pytree.tree_map_only(Tensor, Tensor.clone, batch)
    if isinstance(form, GraphModule):
        args, kwargs = _bound(form, batch)
        return form(*args, **kwargs)
    if isinstance(batch, dict):
        return form(**batch)
    return form(*batch) if isinstance(batch, tuple | list) else form(batch)


def check_module(model: object, what: str) -> GraphModule:
    """The model, an `MXError` where it is no graph."""
    if not isinstance(model, GraphModule):
        kind = "a module" if isinstance(model, nn.Module) else f"of type {type(model).__name__}"
        raise MXError(f"{what} must be a GraphModule, and is {kind}: pass torch.export.export(...).module()")
    return model
