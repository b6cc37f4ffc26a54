"""Quantize the graph of one program of a language model, and make a decoder's program of it."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.algorithms.options import folded_rotation
from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.constants import parameters_behind
from pt2mx.fx.graph.higher_order_ops import hop_calls
from pt2mx.fx.graph.node import node_arg, value_of
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.prepare import prepare_pt2e, prepare_qat_pt2e
from pt2mx.pt2e.flow.weights import carry_notes
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.merge_images import ImageInputs
from pt2mx.pt2e.language.packed_cache import layers_in, pack_cache
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.optimize.distill import distill
from pt2mx.pt2e.optimize.fold_rotation import fold_rotations
from pt2mx.pt2e.optimize.losses import hold_out, kl_divergence
from pt2mx.pt2e.optimize.optimize import optimize
from pt2mx.pt2e.optimize.schedule import Schedule
from pt2mx.pt2e.program.build_program import program_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

aten = torch.ops.aten

#: the options of `distill` that `training` takes
_TRAINING = [
    name for name, p in inspect.signature(distill).parameters.items() if p.kind is p.KEYWORD_ONLY and name != "slices"
]
#: operators that multiply two activations in a decoder
_MATMULS = (
    aten.scaled_dot_product_attention.default,
    aten.matmul.default,
    aten.bmm.default,
)


def quantize_graph(
    graph: GraphModule,
    quantizer: MXQuantizer,
    batches: Sequence[dict[str, Any]],
    stage: Callable[[str], None] = lambda name: None,
    lessons: Sequence[dict[str, Any]] = (),
    example: dict[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    loss: str | Callable[[object, object], Tensor] | None = None,
) -> GraphModule:
    """Optimize, calibrate, distil and convert the float graph of a program.

    `batches` are inputs for calibration and `lessons` for distillation, by name; without lessons the weights are not
    trained. `training` are options of `distill`, and `loss` is its loss. `stage` is called with the name of each stage
    as it begins. On `example` rotations that are folded into the weights must change nothing."""
    optimized = graph
    if quantizer.algorithms is not None:
        stage("optimize")
        optimized = _optimized(graph, quantizer, batches, example)
    stage("calibrate")
    prepared = (prepare_qat_pt2e if lessons else prepare_pt2e)(optimized, quantizer)
    observers = [one for one in prepared.modules() if isinstance(one, MXObserver)]
    with torch.no_grad():
        for batch in batches:
            if all(one.is_done for one in observers):
                break  # only weights are observed, and further batches would repeat them
            prepared(**batch)
    if lessons:
        stage("distill")
        distill(prepared, graph, lessons, loss, **(training or {}))
    stage("convert")
    return convert_pt2e(prepared)


def check_training(training: Mapping[str, Any], lessons: int) -> None:
    """Raise an `MXError` for options of `distill` that would fail after the algorithms, on so many lessons."""
    if unknown := [name for name in training if name not in _TRAINING]:
        raise MXError(f"training has no option {unknown[0]!r}: {nearest(unknown[0], _TRAINING)}")
    schedule = Schedule(**{name: training[name] for name in training if name in Schedule.__dataclass_fields__})
    if training and not lessons:
        raise MXError("training says how lessons train: give lessons, tokens to train on")
    if lessons:
        group = training.get("group")
        schedule.steps(len(hold_out(lessons, torch.Generator())[0]), 1 if group is None else group.size())


def _optimized(
    graph: GraphModule, quantizer: MXQuantizer, batches: Sequence[dict[str, Any]], example: dict[str, Any] | None
) -> GraphModule:
    algorithms = quantizer.algorithms or ()
    rotation = folded_rotation(algorithms)
    if rotation is None:
        return optimize(graph, quantizer, batches)
    rotated = fold_rotations(graph, rotation, example)
    others = [algorithm for algorithm in algorithms if algorithm is not rotation]
    return optimize(rotated, quantizer, batches, algorithms=others) if others else rotated


def divergence_of_logits(outputs: object, references: object) -> Tensor:
    """Return the divergence of the logits, the first output of a decoder; it may also return states."""
    return kl_divergence(pytree.tree_leaves(outputs)[0], pytree.tree_leaves(references)[0])


@contextmanager
def unmatched_settings(found: set[str]) -> Iterator[None]:
    """Collect the warnings of settings that match no operator, without the advice at their ends; give the others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if "matches no operator" in text:
            found.add(text.partition(";")[0])
        else:
            warnings.warn(text, warning.category, stacklevel=4)


@contextmanager
def only_unmatched_in_both(others: set[str] | None) -> Iterator[None]:
    """Warn of settings that match no operator in the block only where they are also among those of another program;
    None: there is no other."""
    if others is None:
        yield
        return
    unmatched: set[str] = set()
    with unmatched_settings(unmatched):
        yield
    for text in sorted(unmatched & others):
        warnings.warn(text, stacklevel=3)


def decoder_program(
    converted: GraphModule,
    program: ExportedProgram,
    quantizer: MXQuantizer,
    device: torch.device,
    images: ImageInputs | None,
) -> ExportedProgram:
    """Return the program of a converted decoder, with a quantized cache if the quantizer asks for one.

    `program` is the float program that the graph was made of, or the one that was sliced."""
    if quantizer.kv_cache is not None:
        pack_cache(converted)
    _erase_idle_calls(converted)
    example = decoder.inputs(layers_in(converted), device, images=images)
    is_traced = any(hop_calls(converted))  # `program_of` takes no subgraphs
    result = decoder.export(converted, example) if is_traced else program_of(converted, program, example)
    carry_notes(converted, result.graph_module)
    return result


def _erase_idle_calls(model: GraphModule) -> None:
    """Erase casts to the dtype that a value has, and assertions about floats that the graph computes, whose dtype is
    that of the weights: a tenth of a decoder's calls. Assertions about inputs and integers stay."""
    for node in model.graph.nodes:
        if node.target not in (aten.to.dtype, aten._assert_tensor_metadata.default):
            continue
        source = node_arg(node)
        value = value_of(source)
        if node.target is aten.to.dtype:
            is_idle = isinstance(value, Tensor) and node.args[1:] == (value.dtype,) and not node.kwargs
        else:
            is_idle = isinstance(value, Tensor) and value.is_floating_point() and source.op == "call_function"
        if is_idle:
            node.replace_all_uses_with(source)
            model.graph.erase_node(node)


def without_activation_matmuls(quantizer: MXQuantizer) -> MXQuantizer:
    """Return a copy of the quantizer that skips matmuls and attention without a parameter among their operands."""
    accepts = quantizer.filter_function

    def has_weight(node: Node) -> bool | str:
        if node.target in _MATMULS and not any(map(parameters_behind, node.all_input_nodes)):
            return "its operands are activations alone, which stay in float in a language model"
        return accepts is None or accepts(node)

    return copy.copy(quantizer).set_filter_function(has_weight)
