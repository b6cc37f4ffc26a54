"""Quantize the graph of one program of a language model, and make a decoder's program of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.higher_order_ops import hop_calls
from pt2mx.fx.graph.node import attribute_of
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.prepare import prepare_pt2e, prepare_qat_pt2e
from pt2mx.pt2e.flow.weights import carry_notes
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.merge_images import ImageInputs
from pt2mx.pt2e.language.packed_cache import layers_in, pack_cache
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.optimize.distill import distill
from pt2mx.pt2e.optimize.losses import kl_divergence
from pt2mx.pt2e.optimize.optimize import optimize
from pt2mx.pt2e.program.build_program import program_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

#: operators that multiply two activations in a decoder
_MATMULS = (
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.bmm.default,
)


def quantize_graph(
    graph: GraphModule,
    quantizer: MXQuantizer,
    batches: Sequence[dict[str, Any]],
    stage: Callable[[str], None] = lambda name: None,
    lessons: Sequence[dict[str, Any]] = (),
) -> GraphModule:
    """Optimize, calibrate, distil and convert the graph of a program.

    Args:
        graph: the float graph, whose first output holds logits.
        quantizer: the quantizer.
        batches: inputs for calibration, by name.
        stage: called with the name of each stage as it begins.
        lessons: inputs for distillation, by name; without them the weights are not trained.
    """
    optimized = graph
    if quantizer.algorithms is not None:
        stage("optimize")
        optimized = optimize(graph, quantizer, batches)
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
        distill(prepared, graph, lessons, _divergence_of_logits)
    stage("convert")
    return convert_pt2e(prepared)


def _divergence_of_logits(outputs: object, references: object) -> Tensor:
    """Return the divergence of the logits; a decoder may also return states."""
    return kl_divergence(*(pytree.tree_leaves(each)[0] for each in (outputs, references)))


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
def only_unmatched_in_both(others: set[str]) -> Iterator[None]:
    """Warn of settings that match no operator in the block only where they are also among those of another program."""
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

    Args:
        converted: the graph, made of `program`. Its cache becomes one of codes.
        program: the float program, or the one that was sliced.
        quantizer: the quantizer.
        device: the device of the example inputs.
        images: the image inputs of the decoder; None: it reads text alone.
    """
    if quantizer.kv_cache is not None:
        pack_cache(converted)
    example = decoder.inputs(layers_in(converted), device, images=images)
    is_traced = any(hop_calls(converted))  # `program_of` takes no subgraphs
    result = decoder.export(converted, example) if is_traced else program_of(converted, program, example)
    carry_notes(converted, result.graph_module)
    return result


def without_activation_matmuls(quantizer: MXQuantizer) -> MXQuantizer:
    """Return a copy of the quantizer that skips matmuls and attention without a parameter among their operands."""
    accepts = quantizer.filter_function

    def has_weight(node: Node) -> bool:
        return (node.target not in _MATMULS or _has_weight(node)) and (accepts is None or accepts(node))

    return copy.copy(quantizer).set_filter_function(has_weight)


def _has_weight(matmul: Node) -> bool:
    return any(map(_is_weight, matmul.all_input_nodes))


def _is_weight(operand: Node) -> bool:
    """Return whether a node is computed from the model's own tensors alone, a parameter among them."""
    model, constants = cast(GraphModule, operand.graph.owning_module), []
    pending, seen = [operand], {operand}
    while pending:
        node = pending.pop()
        if node.op == "get_attr":
            constants.append(attribute_of(model, node))
        elif not node.all_input_nodes:
            return False
        new = [one for one in node.all_input_nodes if one not in seen]
        pending += new
        seen.update(new)
    return any(isinstance(constant, nn.Parameter) for constant in constants)
