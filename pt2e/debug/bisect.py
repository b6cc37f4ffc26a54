"""`bisect`: find the smallest subgraph whose two forms diverge."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from pt2mx.analysis.agreement import is_floating
from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.source_node import module_name, nodes_by_source
from pt2mx.pt2e.debug.batches import check_values, copied, named_leaves
from pt2mx.pt2e.debug.errors import relative_error
from pt2mx.pt2e.debug.interpreter import Pair, RecordingInterpreter, check_module, run, run_against, unchanged
from pt2mx.pt2e.debug.onnx_stage import OnnxStage
from pt2mx.pt2e.files.output import check_output, whole_file

#: the script that runs a subgraph
_SCRIPT = '''"""{title}"""

from pathlib import Path

import torch

import pt2mx
from pt2mx.pt2e.debug.bisect import FORMS
from pt2mx.pt2e.debug.errors import relative_error

torch.manual_seed(0)
subgraph = torch.load(Path(__file__).with_suffix(".pt"), weights_only=False)
first, inputs = subgraph["first"], subgraph["inputs"]
print(first.code)
second = FORMS[subgraph["form"]](first, inputs) if subgraph["form"] else subgraph["second"]
with torch.no_grad():  # a second form that is no module has its outputs in the file
    got = subgraph["outputs"] if second is None else second(*subgraph["second_inputs"])
    print("relative error:", relative_error(got, first(*inputs)))
'''

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
    if path is not None:
        if not isinstance(path, str | os.PathLike) or Path(path).suffix != ".py":
            raise MXError(f"path={path!r} must be a path that ends in .py")
        path = Path(path)
        check_output(path)
        check_output(path.with_suffix(".pt"))
    check_values(batch)
    with torch.no_grad(), unchanged(graph, second):
        suspect = _find(graph, second, batch, bound)
    if suspect is None or suspect.error <= bound:
        return None
    names = tuple(node.name for node in suspect.nodes)
    modules = tuple(dict.fromkeys(map(module_name, suspect.nodes)))
    subgraph = Subgraph(names, modules, suspect.error, path)
    if path is not None:
        save_subgraph(path, str(subgraph), suspect.content)
    return subgraph


def _find(graph: GraphModule, second: Any, batch: Any, bound: float) -> _Suspect | None:
    """Find the operator that differs most from another graph or file, or the fewest of a form made of operators."""
    if isinstance(second, nn.Module | ExportedProgram):
        return _worst_operator(graph, check_module(second, "second"), batch)
    if isinstance(second, str | os.PathLike) and Path(second).suffix == ".onnx":
        return _worst_in_file(graph, OnnxStage(second, "second"), batch)
    if isinstance(second, str) and second not in FORMS:
        raise MXError(f"second={second!r} is unknown: {nearest(second, [*FORMS, 'FILE.onnx'])}")
    if isinstance(second, str) or callable(second):
        return _smallest_subgraph(graph, second, run(graph, batch).values, bound)
    raise MXError(f"second must be one of {', '.join(FORMS)}, a graph, an ONNX file or a function, not {second!r}")


def _smallest_subgraph(
    graph: GraphModule, second: str | Make, values: dict[Node, Any], bound: float
) -> _Suspect | None:
    """Find the shortest range of operators whose form by `second` differs."""
    nodes: list[Node] = []
    for node in graph.graph.nodes:
        is_call = node.op in ("call_function", "call_module", "call_method")
        if is_call and values[node] is not None:  # assertions have no value
            nodes.append(node)
    make = FORMS[second] if isinstance(second, str) else second

    def compared(first: int, last: int) -> _Suspect:
        module, input_nodes = extract_subgraph(graph, nodes[first:last])
        inputs = [values[node] for node in input_nodes]
        other = make(module, inputs)
        if not callable(other):
            raise MXError(f"second must make a function of a subgraph and its inputs, not a {type(other).__name__}")
        outputs = other(*copied(inputs))
        error = relative_error(outputs, module(*copied(inputs)))
        form = second if isinstance(second, str) else None
        return _Suspect(nodes[first:last], error, _content(module, inputs, form, outputs))

    if not nodes or compared(0, len(nodes)).error <= bound:
        return None
    return compared(*smallest_range(len(nodes), lambda first, last: compared(first, last).error > bound))


def _worst_operator(first: GraphModule, second: GraphModule, batch: Any) -> _Suspect:
    """Find the operator with the largest error between two graphs, both with the inputs that it has in `first`."""
    calls: dict[str, tuple[Node, RecordingInterpreter]] = {}
    values: dict[str, list[Any]] = defaultdict(list)
    worst: list[_Suspect] = []

    def record(key: str, node: Node, value: Any, interpreter: RecordingInterpreter) -> None:
        calls[key] = node, interpreter
        values[key].append(value)

    def compare(pair: Pair) -> None:
        error = relative_error(pair.recomputed(), pair.want)
        if worst and error <= worst[-1].error:
            return
        interpreter = pair.interpreter
        nodes, content = _first_form(*calls[pair.key])
        other, other_inputs = extract_subgraph(interpreter.model, interpreter.cone(pair.node, pair.known))
        content["second"] = other
        content["second_inputs"] = [interpreter.cone_input(n, pair.known) for n in other_inputs]
        worst.append(_Suspect(nodes, error, content))

    run(first, batch, record)
    run_against(values, second, batch, compare)
    if not worst:
        raise MXError("the two graphs share no operator: give forms of one export")
    return worst[-1]


def _worst_in_file(first: GraphModule, file: OnnxStage, batch: Any) -> _Suspect:
    """Find the operator with the largest error in an ONNX file, with the inputs that it has in `first`."""
    interpreter = run(first, batch)
    nodes = nodes_by_source(first.graph)
    known = {key: interpreter.values[node] for key, node in nodes.items() if is_floating(interpreter.values[node])}
    _, isolated, _ = file.run(named_leaves(first, batch), known)
    errors = {key: relative_error(value.to(known[key].device), known[key]) for key, value in isolated.items()}
    if not errors:
        raise MXError(f"the stage {file.name!r} shares no operator with the graph: give a file of the same export")
    worst = max(errors, key=errors.__getitem__)
    suspects, content = _first_form(nodes[worst], interpreter)
    content["outputs"] = isolated[worst]
    return _Suspect(suspects, errors[worst], content)


def _first_form(node: Node, interpreter: RecordingInterpreter) -> tuple[list[Node], dict[str, Any]]:
    """Return an operator of the first form, with the item of its outputs, and what a file stores about both."""
    nodes = [*node.all_input_nodes, node] if node.target is getitem else [node]
    module, input_nodes = extract_subgraph(interpreter.model, nodes)
    return nodes, _content(module, [interpreter.values[n] for n in input_nodes])


def _content(first: GraphModule, inputs: list[Any], form: str | None = None, outputs: Any = None) -> dict[str, Any]:
    """Return what the script of a subgraph loads."""
    content = {"first": first, "inputs": inputs, "form": form}
    return content | {"second": None, "second_inputs": inputs, "outputs": outputs}


def extract_subgraph(model: GraphModule, nodes: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
    """Extract nodes, in their order, as a module.

    Returns:
        The module, whose outputs are the values with users outside of it, or the value of the last node; and the nodes
        of `model` whose values are its inputs.
    """
    inside, graph, copies = set(nodes), Graph(), {}
    operands = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    inputs = [n for n in operands if n.op != "get_attr"]
    for n in inputs:
        copies[n] = graph.placeholder(n.name)
        copies[n].meta.update(n.meta)
    for n in (*(n for n in operands if n.op == "get_attr"), *nodes):
        copies[n] = graph.node_copy(n, copies.__getitem__)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)] or [nodes[-1]]
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(model, graph), inputs


def save_subgraph(path: Path, title: str, content: dict[str, Any]) -> None:
    """Write a script and the `.pt` file that it loads: the modules, or the name of the second form, inputs, outputs."""
    with whole_file(path.with_suffix(".pt")) as file:
        torch.save(content, file)
    with whole_file(path) as file:
        file.write(_SCRIPT.format(title=title.replace('"', "'")).encode())


def smallest_range(count: int, differs: Callable[[int, int], bool]) -> tuple[int, int]:
    """Find a small range within (0, count) that `differs`, given that the whole one does.

    Two binary searches find the end first, and then the start.
    """
    low, end = 0, count  # (0, 0) does not differ, (0, end) does
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (low, middle) if differs(0, middle) else (middle, end)
    start, high = 0, end  # (start, end) differs, (high, end) does not
    while high - start > 1:
        middle = (start + high) // 2
        start, high = (middle, high) if differs(middle, end) else (start, middle)
    return start, end
