"""`bisect`: find the smallest subgraph whose two forms diverge."""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.source_node import module_name, nodes_by_source
from pt2mx.pt2e.debug.batches import check_values, copied, named_leaves
from pt2mx.pt2e.debug.errors import comparable, relative_error
from pt2mx.pt2e.debug.interpreter import RecordingInterpreter, check_module, is_tuple_of_operator, run, unchanged
from pt2mx.pt2e.debug.onnx_stage import OnnxStage
from pt2mx.pt2e.debug.subgraph_extract import extract_subgraph, save_subgraph, smallest_range
from pt2mx.pt2e.files.output import check_output

#: returns the other form of a subgraph: a function of the subgraph's inputs
Make = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def _compiled(subgraph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(subgraph)


FORMS: dict[str, Make] = {"compile": _compiled}


@dataclass(frozen=True)
class Subgraph:
    """A subgraph whose two forms differ.

    `nodes` are the names of its operators, `modules` the modules around them, `error` is the norm of the difference of
    its outputs over their norm, `path` the script that runs it, or None.
    """

    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    error: float
    path: Path | None

    def __str__(self) -> str:
        modules = ", ".join(filter(None, self.modules)) or "the root"
        return f"{' -> '.join(self.nodes)} in {modules}: relative error {self.error:.3g}"


#: pickles of older versions name it so
Piece = Subgraph


class _Suspect(NamedTuple):
    """Nodes whose two forms differ by an error, and what a file stores about them."""

    nodes: list[Node]
    error: float
    content: dict[str, Any]


def bisect(
    first: GraphModule | ExportedProgram,
    second: str | os.PathLike[str] | GraphModule | ExportedProgram | Make,
    batch: Any,
    *,
    bound: float = 1e-2,
    path: str | os.PathLike[str] | None = None,
) -> Subgraph | None:
    """Find the smallest subgraph whose two forms differ.

    Each subgraph gets the inputs that it has in a run of `first`, so that errors before it do not count. If the second
    form is another graph or a file, the result is a single operator: the one with the largest error, among those that
    `compare_stages` would compare. Otherwise the second form is made from parts of `first`, in two binary searches.

    Args:
        first: a graph, such as the converted or the lowered model.
        second: "compile"; another graph made from the same export; the path, ending in .onnx, of a file that
            `export_onnx` wrote of it; or a function of a subgraph (a `GraphModule`) and its inputs that returns the
            other form.
        batch: a tensor, a tuple of positional or a dict of keyword arguments.
        bound: the largest norm of the difference of outputs over their norm at which two forms are equal.
        path: the path of a Python file that runs the subgraph; its tensors are in a `.pt` file of the same name. None
            writes none.

    Returns:
        The subgraph; None where the forms agree.

    Raises:
        MXError: for other objects, for a batch that the model does not take or without values, for a bound that is no
            number above 0, and where the two forms share no operator.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> half = lambda subgraph, inputs: lambda *inputs: [y.half().float() for y in subgraph(*inputs)]
        >>> pt2mx.bisect(exported, half, x) is None
        True
        >>> pt2mx.bisect(exported, half, x, bound=1e-6).nodes
        ('linear',)
    """
    graph = check_module(first, "first")
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
        raise MXError(f"bound={bound!r} must be a number above 0")
    if path is not None and (not isinstance(path, str | os.PathLike) or Path(path).suffix != ".py"):
        raise MXError(f"path={path!r} must be a path that ends in .py")
    for output in () if path is None else (Path(path), Path(path).with_suffix(".pt")):
        check_output(output)
    check_values(batch)
    file: OnnxStage | None = None
    suspect: _Suspect | None
    if isinstance(second, str | os.PathLike) and Path(second).suffix == ".onnx":
        file = OnnxStage(second, "second")
    elif isinstance(second, str) and second not in FORMS:
        raise MXError(f"second={second!r} is unknown: {nearest(second, [*FORMS, 'FILE.onnx'])}")
    with torch.no_grad(), unchanged(graph, second):
        if isinstance(second, nn.Module | ExportedProgram):
            suspect = _worst_operator(graph, check_module(second, "second"), batch)
        elif file is not None:
            suspect = _worst_in_file(graph, file, batch)
        elif isinstance(second, str) or callable(second):
            suspect = _smallest_subgraph(graph, second, run(graph, batch).values, bound)
        else:
            raise MXError(
                f"second must be one of {', '.join(FORMS)}, a graph, an ONNX file or a function, not {second!r}"
            )
    if suspect is None or suspect.error <= bound:
        return None
    names = tuple(node.name for node in suspect.nodes)
    modules = tuple(dict.fromkeys(module_name(node) for node in suspect.nodes))
    subgraph = Subgraph(names, modules, suspect.error, None if path is None else Path(path))
    if subgraph.path is not None:
        save_subgraph(subgraph.path, str(subgraph), suspect.content)
    return subgraph


def _smallest_subgraph(
    graph: GraphModule, second: str | Make, values: dict[Node, Any], bound: float
) -> _Suspect | None:
    """Find the shortest range of operators whose form by `second` differs."""
    calls = (node for node in graph.graph.nodes if node.op in ("call_function", "call_module", "call_method"))
    nodes = [node for node in calls if values[node] is not None]  # without assertions, which have no value
    make = FORMS[second] if isinstance(second, str) else second

    def compared(first: int, last: int) -> _Suspect:
        module, input_nodes = extract_subgraph(graph, nodes[first:last])
        inputs = [values[node] for node in input_nodes]
        other = make(module, inputs)
        if not callable(other):
            raise MXError(f"second must make a function of a subgraph and its inputs, not a {type(other).__name__}")
        outputs = other(*copied(inputs))
        content = {"first": module, "inputs": inputs, "form": second if isinstance(second, str) else None}
        error = relative_error(outputs, module(*copied(inputs)))
        content |= {"second": None, "second_inputs": inputs, "outputs": outputs}
        return _Suspect(nodes[first:last], error, content)

    if not nodes or compared(0, len(nodes)).error <= bound:
        return None
    return compared(*smallest_range(len(nodes), lambda first, last: compared(first, last).error > bound))


def _worst_operator(first: GraphModule, second: GraphModule, batch: Any) -> _Suspect:
    """Find the operator with the largest error between two graphs, both with the inputs that it has in `first`.

    Raises:
        MXError: where no value of the two can be compared.
    """
    nodes: dict[str, tuple[Node, RecordingInterpreter]] = {}
    values: dict[str, deque[Any]] = defaultdict(deque)
    known: dict[str, Any] = {}
    worst: list[_Suspect] = []

    def record(key: str, node: Node, value: Any, interpreter: RecordingInterpreter) -> None:
        nodes[key] = node, interpreter
        values[key].append(value)

    def compare(key: str, node: Node, value: Any, interpreter: RecordingInterpreter) -> None:
        if not values.get(key):
            return
        want = values[key].popleft()
        if is_tuple_of_operator(node, want):
            return  # its items are compared
        known[key] = want
        if node.op == "placeholder" or not comparable(value, want):
            return
        error = relative_error(interpreter.recomputed(node, known), want)
        if not worst or error > worst[0].error:
            first_nodes, content = _first_form(*nodes[key])
            other, other_inputs = extract_subgraph(interpreter.model, interpreter.cone(node, known))
            content |= {"second": other, "second_inputs": [interpreter.cone_input(n, known) for n in other_inputs]}
            worst[:] = [_Suspect(first_nodes, error, content)]

    run(first, batch, record)
    run(second, batch, compare)
    if not worst:
        raise MXError("the two graphs share no operator: give forms of one export")
    return worst[0]


def _worst_in_file(first: GraphModule, file: OnnxStage, batch: Any) -> _Suspect:
    """Find the operator with the largest error in an ONNX file, with the inputs that it has in `first`."""
    interpreter = run(first, batch)
    values = {key: interpreter.values[node] for key, node in nodes_by_source(first.graph).items()}
    known = {key: value for key, value in values.items() if comparable(value, value)}
    _, isolated, _ = file.run(named_leaves(first, batch), known)
    errors = {key: relative_error(value.to(known[key].device), known[key]) for key, value in isolated.items()}
    if not errors:
        raise MXError(f"the stage {file.name!r} shares no operator with the graph: give a file of the same export")
    worst = max(errors, key=errors.__getitem__)
    nodes, content = _first_form(nodes_by_source(first.graph)[worst], interpreter)
    return _Suspect(nodes, errors[worst], {**content, "outputs": isolated[worst]})


def _first_form(node: Node, interpreter: RecordingInterpreter) -> tuple[list[Node], dict[str, Any]]:
    """Return an operator of the first form, with the item of its outputs, and what a file stores about both."""
    nodes = [*(node.all_input_nodes if node.target is getitem else []), node]
    module, input_nodes = extract_subgraph(interpreter.model, nodes)
    inputs = [interpreter.values[n] for n in input_nodes]
    content = {"first": module, "inputs": inputs, "second": None, "second_inputs": inputs}
    return nodes, {**content, "form": None, "outputs": None}
