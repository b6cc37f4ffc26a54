"""The contents of an exported program: its packed weights with their scales, and the operators that it calls."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import FakeQuantize, Quantize, value_of
from pt2mx.fx.graph.subgraphs import graph_modules
from pt2mx.fx.portable import is_portable
from pt2mx.pt2e.contents.held import Contents, HeldTensor, HeldWeight, counted, dtype_name, format_of, shape_of_ranges
from pt2mx.pt2e.origin import origin_of
from pt2mx.pt2e.packages.extents import input_nodes, ranges
from pt2mx.pt2e.packed_weights import PackedWeight, packed_weights

_BIAS, _NAN = 127, 255


def of_program(path: str | os.PathLike[str], program: ExportedProgram) -> Contents:
    """The contents of a program that was loaded from `path`."""
    portable = is_portable(program.graph_module)
    weights = [] if portable else list(packed_weights(program))
    packed = {tensor.data_ptr() for weight in weights for tensor in (weight.codes, weight.scales)}
    held = {**program.state_dict, **program.constants}
    rest = {name: t for name, t in held.items() if isinstance(t, Tensor) and t.data_ptr() not in packed}
    graphs = graph_modules(program.graph_module)
    return Contents(
        file=str(path),
        kind="program",
        bytes=Path(path).stat().st_size,
        origin=origin_of(path),
        inputs=tuple(_inputs(program)),
        weights=tuple(map(_held_weight, weights)),
        tensors=tuple(HeldTensor(name, dtype_name(t.dtype), tuple(t.shape), t.nbytes) for name, t in rest.items()),
        operators=counted(name for graph in graphs for node in graph.graph.nodes if (name := _operator(node))),
        activations=counted(_activations(graphs)),
        portable=portable,
    )


def _inputs(program: ExportedProgram) -> Iterable[HeldTensor]:
    for node, extents in zip(input_nodes(program), ranges(program), strict=True):
        value = value_of(node)
        kind = dtype_name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        yield HeldTensor(node.name, kind, shape_of_ranges(extents or ()))


def _held_weight(weight: PackedWeight) -> HeldWeight:
    found = torch.bincount(weight.scales.flatten().to(torch.int64), minlength=_NAN + 1).tolist()
    scales = {byte - _BIAS: count for byte, count in enumerate(found[:_NAN]) if count}
    nbytes = weight.codes.nbytes + weight.scales.nbytes
    return HeldWeight(weight.name, format_of(weight.spec), weight.spec.axis, weight.shape, nbytes, scales, found[_NAN])


def _activations(graphs: Iterable[GraphModule]) -> Iterable[str]:
    for graph in graphs:
        for node in graph.graph.nodes:
            call = Quantize.of(node) or FakeQuantize.of(node)
            if call is not None:
                yield str(call.spec)


def _operator(node: Node) -> str | None:
    """The name of the operator that a node calls; None for what computes nothing."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.replace("::", ".")
    return str(node.target) if isinstance(node.target, HigherOrderOperator) else None
