"""`quantize_language_model`: export and quantize a causal language model of transformers, with its cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.constants import computed_from
from pt2mx.fx.graph.higher_order_ops import hop_calls
from pt2mx.fx.graph.node import attribute_of
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.pt2e.checkpoints.coverage import CheckpointValues, tensors_read
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.arguments import LONGEST_TEXT, check_model, check_texts
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.language.packed_cache import layers_in, pack_cache
from pt2mx.pt2e.language.rope import longest_text
from pt2mx.pt2e.language.tensor_parallel import check_blocks
from pt2mx.pt2e.optimize.optimize import optimize
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.program import program_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.weights import carry_notes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: operators that multiply two activations in a decoder
_MATMULS = (
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.bmm.default,
)


def quantize_language_model(
    model: PreTrainedModel,
    quantizer: MXQuantizer,
    texts: Sequence[Tensor] = (),
    tokenizer: Any = None,
    stage: Callable[[str], None] = lambda name: None,
    *,
    part: str | None = None,
    allow_partial: bool = False,
    length: int | None = None,
) -> LanguageModel:
    """Export a causal language model with its cache, and quantize its weights and the inputs multiplied with them.

    Matmuls of two activations stay in high precision. In attention, blocks would run along the cache and change with
    each token; other such matmuls compute the angles of positions.

    Args:
        model: a model of transformers in evaluation mode, or the result of `shard`. It is not changed.
        quantizer: the quantizer; its algorithms run as in `pt2mx.optimize`.
        texts: tokens to calibrate with, (B, S) int64 each, without padding.
        tokenizer: the tokenizer of the result.
        stage: called with the name of each stage as it begins.
        part: the top-level module to put into the program, such as "language_model"; the others may be left out.
        allow_partial: True: the program may leave out any part that text does not reach.
        length: the tokens of the longest text, for a model with RoPE of the types "longrope" and "dynamic": the program
            has the frequencies for that length. None: those for short texts. Other models read any number of tokens.

    Returns:
        A model that generates and can be saved; its `coverage` is the share of the model's values that it holds.

    Raises:
        MXError: for a model that keeps anything but keys and values of its tokens and the states of recurrences; for
            one with parts, other than unused heads, that tokens do not reach, such as a vision tower; and as each stage
            does.

    Example:
        >>> import torch, transformers
        >>> from pt2mx import MXQuantizer, quantize_language_model
        >>> sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> config = transformers.LlamaConfig(**sizes, vocab_size=128, bos_token_id=1, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> quantized = quantize_language_model(model, MXQuantizer.from_recipe("mxfp4_weight_only"))
        >>> quantized.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False).shape
        torch.Size([1, 8])
    """
    check_model(model)
    check_texts(texts, model.config.get_text_config().vocab_size)
    stage("export")
    length = longest_text(model, length)
    layers = layers_of(model)
    exported = decoder.export_decoder(model, length)
    coverage = CheckpointValues(model).held_by(tensors_read(exported, decoder.PREFIX))
    coverage.check(part, allow_partial)
    # reports count the parameters of the float model: without the parts that the program leaves out
    graph = remove_unused(exported.module())
    quantizer = without_activation_matmuls(quantizer)
    check_blocks(graph, quantizer)
    batches = [decoder.inputs(layers, model.device, text) for text in texts]
    converted = quantize_graph(graph, quantizer, batches, stage)
    if quantizer.kv_cache is None and not any(hop_calls(converted)):
        program = program_of(converted, exported)
    else:
        program = decoder.export(pack_cache(converted), decoder.inputs(layers_in(converted), model.device))
    carry_notes(converted, program.graph_module)
    config = copy.deepcopy(model.config)
    if length is not None:
        setattr(config, LONGEST_TEXT, length)
    language_model = LanguageModel(program, config, copy.deepcopy(model.generation_config), tokenizer)
    language_model.coverage = coverage
    return language_model


def quantize_graph(
    graph: GraphModule, quantizer: MXQuantizer, batches: Sequence[dict[str, Any]], stage: Callable[[str], None]
) -> GraphModule:
    """Optimize, calibrate and convert the graph of a program; `batches` are its inputs, by name."""
    if quantizer.algorithms is not None:
        stage("optimize")
        graph = optimize(graph, quantizer, batches)
    stage("calibrate")
    prepared = prepare_pt2e(graph, quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(**batch)
    stage("convert")
    return convert_pt2e(prepared)


def without_activation_matmuls(quantizer: MXQuantizer) -> MXQuantizer:
    """Return a copy of the quantizer that skips matmuls and attention without a parameter among their operands."""
    accepts = quantizer.filter_function

    def has_weight(node: Node) -> bool:
        return (node.target not in _MATMULS or _has_weight(node)) and (accepts is None or accepts(node))

    return copy.copy(quantizer).set_filter_function(has_weight)


def _has_weight(matmul: Node) -> bool:
    model = cast(GraphModule, matmul.graph.owning_module)
    for operand in matmul.all_input_nodes:
        leaves = [node for node in computed_from(operand) if not node.all_input_nodes]
        constants = [attribute_of(model, leaf) for leaf in leaves if leaf.op == "get_attr"]
        if len(constants) == len(leaves) and any(isinstance(constant, nn.Parameter) for constant in constants):
            return True
    return False
