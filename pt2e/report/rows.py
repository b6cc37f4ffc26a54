"""The rows of a report: what was done to each operator of a graph, and what was observed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.module_stack import module_name
from pt2mx.fx.graph.node import FakeQuantize, called, node_arg
from pt2mx.fx.graph.qdq import spec_of_dequantize
from pt2mx.fx.graph.subgraphs import captured_operands, named_graph_modules
from pt2mx.fx.training.fuse_batch_norm import ScaledWeight
from pt2mx.kernels.packing import packed_length
from pt2mx.pt2e.format_observer import CANDIDATES_KEY
from pt2mx.pt2e.observer import STATISTICS_KEY, MXObserver
from pt2mx.pt2e.quantizer.annotate import REASON_KEY, REMARK_KEY
from pt2mx.pt2e.quantizer.operators import operand_node, operands_of, operator_name, quantizable_operators, role_of
from pt2mx.pt2e.report.contractions import is_contraction, operator_path
from pt2mx.spec import MXSpec


@dataclass(frozen=True)
class OperandReport:
    """One operand: the spec it is quantized to (None: high precision), what calibration saw of it, also under each
    candidate of an `MXFormatObserver`, and the values and bytes of a constant one (0 for a computed one, and for what
    an earlier operator shares)."""

    role: str
    spec: str | None
    statistics: QuantizationStatistics | None
    candidates: dict[str, QuantizationStatistics]
    values: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class OperatorReport:
    """One operator, why it or an operand was left in high precision, if so, and what to know of the way in which it is
    quantized. In a sub-graph its name is a path."""

    name: str
    module: str
    operator: str
    operands: tuple[OperandReport, ...]
    reason: str | None
    remark: str | None = None

    @property
    def quantized(self) -> bool:
        return any(operand.spec for operand in self.operands)

    @property
    def notes(self) -> str:
        """The reason, the remark, and what is odd about the values that were observed."""
        return "; ".join(filter(None, [self.reason, self.remark, *map(_oddities, self.operands)]))


def operator_reports(model: GraphModule) -> Iterator[OperatorReport]:
    """Every operator that can be quantized and every other contraction, in the order of execution, those of each
    sub-graph after those around it."""
    counted: set[object] = set()
    outside = captured_operands(model)
    for path, inner in named_graph_modules(model):
        constants, quantizable = constant_nodes(inner.graph), set(quantizable_operators(inner.graph))
        for node in inner.graph.nodes:
            if node in quantizable or is_contraction(called(node)):
                found = _operands(node, constants) if node in quantizable else _float_inputs(node, constants)
                operands = tuple(_operand_report(inner, *operand, constants, outside, counted) for operand in found)
                yield OperatorReport(
                    name=f"{path}.{node.name}" if path else node.name,
                    module=module_name(node),
                    operator=operator_name(called(node)) if node in quantizable else operator_path(called(node)),
                    operands=operands,
                    reason=_reason(node, node in quantizable, path, any(operand.spec for operand in operands)),
                    remark=node.meta.get(REMARK_KEY),
                )


def _operands(node: Node, constants: set[Node]) -> list[tuple[str, Node]]:
    """(role, argument) of the operands of a quantizable operator."""
    arguments = [(operand, operand_node(node, operand)) for operand in operands_of(node)]
    return [(role_of(operand, argument, constants), argument) for operand, argument in arguments if argument]


def _float_inputs(node: Node, constants: set[Node]) -> list[tuple[str, Node]]:
    """The same of another one: its floating-point tensors."""
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return [("weight" if n in constants else "activation", n) for n in inputs if n.meta["val"].is_floating_point()]


def _reason(node: Node, quantizable: bool, path: str, quantized: bool) -> str | None:
    if not quantizable:
        return "operator not supported"
    if quantized or REASON_KEY in node.meta:
        return node.meta.get(REASON_KEY)
    return f"inside the sub-graph {path}" if path else "not annotated"


def _operand_report(
    model: GraphModule,
    role: str,
    argument: Node,
    constants: set[Node],
    outside: Mapping[Node, Sequence[object]],
    counted: set[object],
) -> OperandReport:
    source, spec, seen = _quantized(model, argument)
    value = argument.meta.get("val", source.meta.get("val"))
    form: object = spec
    if source.op == "call_module" and isinstance(model.get_submodule(str(source.target)), ScaledWeight):
        source, form = node_arg(source), (spec, source)
    each = [_Storage(0, 0, 0)]
    if source in constants and isinstance(value, torch.Tensor):
        each += [_storage(value, spec, origin, form, counted) for origin in origins_of(source, outside)]
    stored = _Storage(*map(sum, zip(*each, strict=True)))
    return OperandReport(
        role, None if spec is None else str(spec), seen.get(STATISTICS_KEY), seen.get(CANDIDATES_KEY, {}), *stored
    )


def _quantized(model: GraphModule, argument: Node) -> tuple[Node, MXSpec | None, Mapping[str, Any]]:
    """The tensor behind an operand, its spec (None: high precision), and a meta with what calibration saw of it."""
    if argument.op == "call_module":
        observer = model.get_submodule(str(argument.target))
        if isinstance(observer, MXObserver):
            return node_arg(argument), observer.spec, observer.statistics_meta()
        return node_arg(argument), None, {}  # another quantizer's own
    if argument.target is ops.dequantize_mx:
        return node_arg(argument), spec_of_dequantize(argument), argument.meta
    if (fake := FakeQuantize.of(argument)) is not None:
        return fake.x, fake.spec, argument.meta
    return argument, None, {}


class _Storage(NamedTuple):
    """The values of a constant, and its bytes before quantization and after it."""

    values: int
    before: int
    after: int


def _storage(value: torch.Tensor, spec: MXSpec | None, origin: object, form: object, counted: set[object]) -> _Storage:
    """The storage that a constant adds to what is `counted`: before quantization each tensor counts once, after it once
    in each form in which it is kept."""
    first, kept = origin not in counted, (origin, form) in counted
    counted |= {origin, (origin, form)}
    held = value.numel() * value.element_size()
    after = held if spec is None else packed_bytes(value.shape, spec)
    return _Storage(value.numel() if first else 0, held if first else 0, 0 if kept else after)


def origins_of(source: Node, outside: Mapping[Node, Sequence[object]]) -> list[object]:
    """The identities of a constant: the name of a parameter or buffer, else the node that computes it. In a graph
    inside, which may be called with several (`outside` has its operands), those of all."""
    while source.target is torch.ops.aten.alias.default:
        source = node_arg(source)
    if source in outside:
        operands = [operand for operand in outside[source] if isinstance(operand, Node)]
        return list(dict.fromkeys(origin for operand in operands for origin in origins_of(operand, {})))
    return [source.target if source.op == "get_attr" else source]


def packed_bytes(shape: Sequence[int], spec: MXSpec) -> int:
    """Bytes of the codes and scales of a tensor of this shape."""
    length = shape[spec.axis]
    rows = math.prod(shape) // length if length else 0
    return rows * (packed_length(length, spec.element.bits) + -(-length // spec.block_size))


def _oddities(operand: OperandReport) -> str:
    seen = operand.statistics
    found = []
    if seen and seen.nonfinite:
        found.append(f"{seen.nonfinite:,} of {seen.values:,} values are Inf or NaN")
    if seen and seen.empty:
        found.append(f"{seen.empty:,} of {seen.tensors:,} tensors are empty")
    return f"{operand.role}: {', '.join(found)}" if found else ""
