"""Describe the constants that a model quantizes: their sources, the noise of their formats, NaN and Inf.

Conversion packs them, so it notes both for the report beforehand.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.analysis.sums import quantization_noise
from pt2mx.functional import fake_quantize_mx, tensor_scale_mx
from pt2mx.fx.graph.constants import computed_from, constant_nodes
from pt2mx.fx.graph.higher_order_ops import captured_operands, graph_modules
from pt2mx.fx.graph.node import (
    attribute_of,
    called_module,
    function_of,
    model_of,
    name_of,
    node_arg,
    parameter_of,
    tensor_of,
)
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.training.fuse_batch_norm import ScaledWeight
from pt2mx.fx.training.train_eval import TrainEvalModule
from pt2mx.pt2e.flow.packed_weights import stored_weights
from pt2mx.pt2e.flow.sizes import FLOAT_SIZE_KEY, SOURCES_KEY, CapturedOperands, float_size, sources_of
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.observe.format_observer import CANDIDATES_KEY, MXFormatObserver
from pt2mx.pt2e.observe.observer import NOTES_KEY, ROUNDING_KEY, STATISTICS_KEY, MXObserver, observer_of
from pt2mx.pt2e.observe.torchao_pt2e import is_fake
from pt2mx.pt2e.quantizer.annotate import REASON_KEY, REMARK_KEY

#: the meta of nodes that a report reads
_CARRIED = (STATISTICS_KEY, CANDIDATES_KEY, SOURCES_KEY, REASON_KEY, REMARK_KEY)


def note_weights(prepared: GraphModule) -> None:
    """Note the report's facts about a constant at its observers, for the converted model."""
    captured = captured_operands(prepared)
    amaxes: dict[Node, list[Tensor]] = {}
    for node, observer in observers_of_constants(prepared):
        sources = {SOURCES_KEY: sources_of(node_arg(node), captured)}
        node.meta[NOTES_KEY] = {**weight_statistics(observer, node, captured, amaxes), **sources}


def observers_of_constants(prepared: GraphModule) -> Iterator[tuple[Node, MXObserver]]:
    """Yield the calls of observers of constants in a prepared model and its subgraphs, each with its observer."""
    for graph in graph_modules(prepared):
        constants = constants_of(graph)
        for node in graph.graph.find_nodes(op="call_module"):
            observer = observer_of(node)
            if observer is not None and is_constant(node_arg(node), constants):
                yield node, observer


def carry_notes(converted: GraphModule, exported: GraphModule) -> None:
    """Copy the notes of a converted model to its re-exported graph, because export drops them."""
    exported_calls = _by_target(exported)
    for target, nodes in _by_target(converted).items():
        if len(exported_calls[target]) == len(nodes):
            for node, same in zip(nodes, exported_calls[target], strict=True):
                same.meta.update({key: node.meta[key] for key in _CARRIED if key in node.meta})
    exported.meta[FLOAT_SIZE_KEY] = float_size(converted)


def _by_target(model: GraphModule) -> dict[object, list[Node]]:
    """Return the calls of each operator, in order."""
    calls = defaultdict(list)
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            if node.op == "call_function":
                calls[node.target].append(node)
    return calls


def constants_of(model: GraphModule) -> set[Node]:
    """Return the constant nodes of a graph, prepared or not; the result of observing a constant is constant."""
    return constant_nodes(model.graph, lambda node: observer_of(node) is not None)


def is_constant(node: Node, constants: set[Node]) -> bool:
    """Return True for a constant, and for a weight scaled by a batch norm in training, which conversion folds."""
    module = called_module(node)
    return (node_arg(node) if isinstance(module, ScaledWeight) else node) in constants


def weight_statistics(
    observer: MXObserver, node: Node, captured: CapturedOperands, amaxes: dict[Node, list[Tensor]] | None = None
) -> dict[str, Any]:
    """Return the meta that a report reads for a constant, which a call of its observer reads: the observer's
    statistics.

    If the observer saw nothing, or the constant was trained since, the function computes the noise of the formats
    instead. A traced constant has no statistics. Of values that `optimize` rounded the noise is that of the float
    values. `amaxes` keeps the values of the nodes that siblings read.
    """
    noted = _statistics_of_values(observer, node, captured, amaxes)
    statistics = noted.get(STATISTICS_KEY)
    for part in computed_from(node):
        for source in (part, *captured.get(part, ())):
            if isinstance(source, Node) and ROUNDING_KEY in source.meta and statistics and statistics.sqnr == math.inf:
                return {**noted, STATISTICS_KEY: replace(statistics, sqnr=source.meta[ROUNDING_KEY].sqnr)}
    return noted


def _statistics_of_values(
    observer: MXObserver, node: Node, captured: CapturedOperands, amaxes: dict[Node, list[Tensor]] | None
) -> dict[str, Any]:
    """Return the same meta for the values that the constant has."""
    seen = observer.statistics_meta()
    if seen.get(STATISTICS_KEY) is not None and not isinstance(observer, MXFakeQuantize):
        return seen
    constant, *shared = [source for source in node.args if isinstance(source, Node)]
    amaxes = {} if amaxes is None else amaxes
    for amax in shared:
        if amax not in amaxes:
            amaxes[amax] = list(_values(amax, captured))
    read = list(zip(_values(constant, captured), *(amaxes[amax] for amax in shared), strict=False))
    values = [observer.anchored(value.detach()) for value, *_ in read]
    if any(map(is_fake, values)):
        return seen
    scales = [_shared_scale(observer, *amax) for _, *amax in read]
    noise: dict[str, Any] = {STATISTICS_KEY: quantization_noise(values, observer.spec, scales)}
    if isinstance(observer, MXFormatObserver):
        noise[CANDIDATES_KEY] = {str(s): quantization_noise(values, s) for s in observer.candidate_specs}
    return noise


@torch.no_grad()
def _values(node: Node, captured: CapturedOperands) -> Iterator[Tensor]:
    """Yield the values of a constant, one for each call of its graph with other operands."""
    needed = computed_from(node)
    for number in range(max(len(captured.get(part, [None])) for part in needed)):
        values: dict[Node, Any] = {}
        for part in needed:
            values[part] = _value(part, values, captured, number)
        yield values[node]


def _value(node: Node, values: dict[Node, Any], captured: CapturedOperands, number: int) -> Any:
    if node.op == "placeholder":
        operands = captured[node]
        operand = operands[min(number, len(operands) - 1)]
        return next(iter(_values(operand, captured))) if isinstance(operand, Node) else operand
    if node.op == "get_attr":
        return attribute_of(model_of(node.graph), node)
    args, kwargs = cast(
        tuple[tuple[Any, ...], dict[str, Any]], torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    )
    module = called_module(node)
    if module is None:
        return function_of(node)(*args, **kwargs)
    if isinstance(module, MXObserver):
        return fake_quantize_mx(module.anchored(args[0]), module.spec, tensor_scale=_shared_scale(module, *args[1:]))
    return module.in_evaluation(*args, **kwargs) if isinstance(module, TrainEvalModule) else module(*args, **kwargs)


def _shared_scale(observer: MXObserver, amax: Tensor | None = None) -> Tensor | None:
    """Return the tensor scale that a constant shares with its siblings; None without siblings."""
    return None if amax is None else tensor_scale_mx(amax, observer.spec)


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Return the names of the floating-point parameters that hold a NaN or an Inf."""
    return [name for name, p in model.named_parameters() if p.is_floating_point() and not p.isfinite().all()]


def nonfinite_weights(converted: GraphModule) -> list[str]:
    """Return the names of the weights of a converted model that held a NaN or an Inf."""
    names = []
    for codes, scales, read in stored_weights(converted):
        scale = tensor_of(model_of(scales.graph), scales)
        if not is_fake(scale) and bool(read.spec.scale_format.is_nan(scale).any()):
            names.append(parameter_of(name_of(codes)))
    names += (str(x.target) for x, _ in _nonfinite_pairs(converted) if x.op == "get_attr")
    return list(dict.fromkeys(names))


def nonfinite_operands(converted: GraphModule) -> list[str]:
    """Return the operands of a converted model that held a NaN or an Inf, as far as calibration saw them.

    Weights are named by their parameters, other operands by their operators' modules.
    """
    names = nonfinite_weights(converted)
    for x, dequantize in _nonfinite_pairs(converted):
        if x.op != "get_attr":
            names.append(f"an operand of {module_name(dequantize) or next(iter(dequantize.users)).name}")
    return list(dict.fromkeys(names))


def _nonfinite_pairs(converted: GraphModule) -> Iterator[tuple[Node, Node]]:
    """Yield (quantized node, its `dequantize_mx`) where calibration saw a NaN or an Inf, without folded weights."""
    for graph in graph_modules(converted):
        for node in graph.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
            seen, scale = node.meta.get(STATISTICS_KEY), node_arg(node, 1)
            if seen is not None and seen.nonfinite and scale.target is operator.getitem:
                yield node_arg(node_arg(scale)), node
