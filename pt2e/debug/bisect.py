"""`bisect`: the smallest piece of a graph whose two forms come apart."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.source_node import module_name
from pt2mx.pt2e.debug.batches import check_values, copied
from pt2mx.pt2e.debug.differences import relative_error
from pt2mx.pt2e.debug.onnx_stage import OnnxStage
from pt2mx.pt2e.debug.pieces import piece_of, save_piece, smallest
from pt2mx.pt2e.debug.watched import check_module, run, unchanged
from pt2mx.pt2e.debug.worst_operator import Found, worst_in_file, worst_operator
from pt2mx.pt2e.output import check_output

#: makes another form of a piece and its inputs: a function of them
Make = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def _compiled(piece: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(piece)


FORMS: dict[str, Make] = {"compile": _compiled}


@dataclass(frozen=True)
class Piece:
    """A piece of a graph whose two forms differ.

    `nodes` are its operators by name, `modules` where they stand in the model, `error` the norm of the difference of
    its outputs over their norm, `path` the script that runs it, or None.
    """

    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    error: float
    path: Path | None

    def __str__(self) -> str:
        place = ", ".join(filter(None, self.modules)) or "the root"
        return f"{' -> '.join(self.nodes)} in {place}: relative error {self.error:.3g}"


def bisect(
    first: GraphModule | ExportedProgram,
    second: str | os.PathLike[str] | GraphModule | ExportedProgram | Make,
    batch: Any,
    *,
    bound: float = 1e-2,
    path: str | os.PathLike[str] | None = None,
) -> Piece | None:
    """Find the smallest piece of a graph whose two forms differ.

    Each piece is given the values that it has in a run of `first`, so that no error before it counts. With another
    graph, or a file, as the second form the pieces are single operators, found again as `compare_stages` does, and the
    one of the largest error is chosen. Otherwise the second form is made of pieces of `first`, by two binary searches.

    Args:
        first: a graph: converted or lowered, say.
        second: "compile"; another graph made from the same export; the path, ending in .onnx, of a file that
            `export_onnx` wrote of it; or a function of a piece (a `GraphModule`) and its inputs that gives its other
            form.
        batch: a tensor, a tuple of positional or a dict of keyword arguments.
        bound: on the norm of the difference of outputs over their norm; what differs by less is equal.
        path: of a Python file that runs the piece, beside a file of tensors; None: none is written.

    Returns:
        The piece; None where the forms agree.

    Raises:
        MXError: for other objects, for a batch that the model does not take or without values, for a bound that is no
            number above 0, and where the two forms share no operator.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> half = lambda piece, inputs: lambda *inputs: [y.half().float() for y in piece(*inputs)]
        >>> pt2mx.bisect(exported, half, x) is None
        True
        >>> pt2mx.bisect(exported, half, x, bound=1e-6).nodes
        ('linear',)
    """
    graph = _graph(first, "first")
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
        raise MXError(f"bound={bound!r} must be a number above 0")
    if path is not None and (not isinstance(path, str | os.PathLike) or Path(path).suffix != ".py"):
        raise MXError(f"path={path!r} must be a path that ends in .py")
    for place in () if path is None else (Path(path), Path(path).with_suffix(".pt")):
        check_output(place)
    check_values(batch)
    file: OnnxStage | None = None
    found: Found | None
    if isinstance(second, str | os.PathLike) and Path(second).suffix == ".onnx":
        file = OnnxStage(second, "second")
    elif isinstance(second, str) and second not in FORMS:
        raise MXError(f"second={second!r} is unknown: {nearest(second, [*FORMS, 'FILE.onnx'])}")
    with torch.no_grad(), unchanged(graph, second):
        if isinstance(second, nn.Module | ExportedProgram):
            found = worst_operator(graph, _graph(second, "second"), batch)
        elif file is not None:
            found = worst_in_file(graph, file, batch)
        elif isinstance(second, str) or callable(second):
            found = _smallest_piece(graph, second, run(graph, batch).values, bound)
        else:
            raise MXError(
                f"second must be one of {', '.join(FORMS)}, a graph, an ONNX file or a function, not {second!r}"
            )
    if found is None or found.error <= bound:
        return None
    modules = tuple(dict.fromkeys(module_name(node) for node in found.nodes))
    piece = Piece(tuple(node.name for node in found.nodes), modules, found.error, None if path is None else Path(path))
    if piece.path is not None:
        save_piece(piece.path, str(piece), found.content)
    return piece


def _smallest_piece(graph: GraphModule, second: str | Make, values: dict[Node, Any], bound: float) -> Found | None:
    """The shortest range of operators of which `second` makes something else."""
    calls = (node for node in graph.graph.nodes if node.op in ("call_function", "call_module", "call_method"))
    nodes = [node for node in calls if values[node] is not None]  # assertions compute nothing
    make = FORMS[second] if isinstance(second, str) else second

    def compared(first: int, last: int) -> Found:
        module, needed = piece_of(graph, nodes[first:last])
        inputs = [values[node] for node in needed]
        other = make(module, inputs)
        if not callable(other):
            raise MXError(f"second must make a function of a piece and its inputs, not a {type(other).__name__}")
        outputs = other(*copied(inputs))
        content = {"first": module, "inputs": inputs, "form": second if isinstance(second, str) else None}
        error = relative_error(outputs, module(*copied(inputs)))
        return Found(nodes[first:last], error, {**content, "second": None, "second_inputs": inputs, "outputs": outputs})

    if not nodes or compared(0, len(nodes)).error <= bound:
        return None
    return compared(*smallest(len(nodes), lambda first, last: compared(first, last).error > bound))


def _graph(model: object, what: str) -> GraphModule:
    return check_module(model.module() if isinstance(model, ExportedProgram) else model, what)
