"""The flow for language models: a causal language model of transformers, with its cache, to a `LanguageModel`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.attributes import attribute_of
from pt2mx.fx.graph.constants import computed_from
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.pt2e.checkpoints.coverage import CheckpointValues, tensors_read
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.arguments import check_model, check_texts
from pt2mx.pt2e.language.cache import layers_of
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.packed_cache import layers_in, pack_cache
from pt2mx.pt2e.language.tensor_parallel import check_blocks
from pt2mx.pt2e.optimize.optimize import optimize
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.weights import carry_notes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: what multiplies activations in a decoder
_PRODUCTS = (
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
) -> LanguageModel:
    """Export a causal language model with its cache, and quantize its weights and what meets them.

    Products of two activations stay in high precision: those of attention, whose blocks would run along the cache and
    change with each token, and the angles of positions.

    Args:
        model: of transformers, in evaluation mode, or what `shard` made of one. It stays as it is.
        quantizer: its algorithms are applied, as `pt2mx.optimize` does.
        texts: tokens to calibrate with, (B, S) int64 each, without padding.
        tokenizer: of the result.
        stage: is told the name of each stage as it begins.
        part: the top-level module that the program holds, such as "language_model": others may be left out.
        allow_partial: True: any part that text does not reach may be left out.

    Returns:
        A model that generates, and can be saved; its `coverage` is the share of the model's values that it holds.

    Raises:
        MXError: for a model that keeps anything but keys and values of its tokens, for one of which tokens do not reach
            more than unused heads, as images' tower of a vision-language model, and as the stages do.

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
    layers = layers_of(model)
    exported = decoder.export_decoder(model)
    coverage = CheckpointValues(model).held_by(tensors_read(exported, decoder.PREFIX))
    coverage.check(part, allow_partial)
    # a part that is left out is none of the float model that reports count
    graph = remove_unused(exported.module())
    own = without_products_of_activations(quantizer)
    check_blocks(graph, own)
    batches = [decoder.inputs(layers, model.device, text) for text in texts]
    if own.algorithms is not None:
        stage("optimize")
        graph = optimize(graph, own, batches)
    stage("calibrate")
    prepared = prepare_pt2e(graph, own)
    with torch.no_grad():
        for batch in batches:
            prepared(**batch)
    stage("convert")
    converted = pack_cache(convert_pt2e(prepared))
    program = decoder.export(converted, decoder.inputs(layers_in(converted), model.device))
    carry_notes(converted, program.graph_module)
    found = LanguageModel(program, copy.deepcopy(model.config), copy.deepcopy(model.generation_config), tokenizer)
    found.coverage = coverage
    return found


def without_products_of_activations(quantizer: MXQuantizer) -> MXQuantizer:
    """The quantizer, which leaves matrix products and attention alone that no parameter is a factor of."""
    own, chosen = copy.copy(quantizer), quantizer.filter_function

    def accepted(node: Node) -> bool:
        return (node.target not in _PRODUCTS or _has_weight(node)) and (chosen is None or chosen(node))

    return own.set_filter_function(accepted)


def _has_weight(product: Node) -> bool:
    model = cast(GraphModule, product.graph.owning_module)
    for factor in product.all_input_nodes:
        leaves = [node for node in computed_from(factor) if not node.all_input_nodes]
        held = [attribute_of(model, leaf) for leaf in leaves if leaf.op == "get_attr"]
        if len(held) == len(leaves) and any(isinstance(one, nn.Parameter) for one in held):
            return True
    return False
