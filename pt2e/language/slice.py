"""Slice a language model to a narrower recipe, without data."""

from __future__ import annotations

import copy
import warnings

import torch
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.node import Dequantize
from pt2mx.pt2e.flow.packed_weights import converted_graph
from pt2mx.pt2e.flow.prepare import check_quantizer
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.layers import cache_of
from pt2mx.pt2e.language.merge_images import ImageInputs
from pt2mx.pt2e.language.quantize_graph import (
    decoder_program,
    only_unmatched_in_both,
    unmatched_settings,
    without_activation_matmuls,
)
from pt2mx.pt2e.language.tensor_parallel import is_shard
from pt2mx.pt2e.optimize.slice import slice_graph, slice_program
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.spec import MXSpec


def slice_language_model(model: LanguageModel, quantizer: MXQuantizer) -> LanguageModel:
    """Re-quantize the packed weights of a language model to a narrower recipe, without data.

    `pt2mx.slice_program` says how. Matmuls of two activations stay in high precision. A quantized cache keeps its
    format, and a warning says so where the recipe has another.

    Args:
        model: a result of `quantize_language_model` or `LanguageModel.from_pretrained`. It is not changed.
        quantizer: the recipe. Its weights have at most as many bits as those of the model, and blocks of equal size.

    Returns:
        The model for the recipe, with the configurations and the tokenizer of the other.

    Raises:
        MXError: as `slice_program`; for another object, and a model that is divided among ranks.

    Example:
        >>> import torch, transformers, pt2mx
        >>> sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> config = transformers.LlamaConfig(**sizes, vocab_size=128, bos_token_id=1, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> anchor = pt2mx.quantize_language_model(model, pt2mx.MXQuantizer.from_recipe("mxint8"))
        >>> narrow = pt2mx.slice_language_model(anchor, pt2mx.MXQuantizer.from_recipe("mxfp4_decoder"))
        >>> sorted({str(weight.spec.element.name) for weight in pt2mx.packed_weights(narrow.program)})
        ['fp4_e2m1', 'int8']
    """
    if not isinstance(model, LanguageModel):
        raise MXError(f"expected a LanguageModel, not {type(model).__name__}: slice_program takes a program")
    check_quantizer(quantizer, MXQuantizer)
    if is_shard(model.program):
        raise MXError("a model that is divided among ranks is not sliced: quantize it with the narrower recipe")
    graph = converted_graph(model.program)
    if (cache := _cache_format(graph)) is not None:
        _warn_of_cache(cache, quantizer)
        quantizer = copy.copy(quantizer).set_kv_cache(None)
    quantizer = without_activation_matmuls(quantizer)
    encoder, unmatched = None, set[str]()
    if model.encoder is not None:
        with unmatched_settings(unmatched):
            encoder = slice_program(model.encoder.program, copy.copy(quantizer).set_kv_cache(None))
    images = ImageInputs.of_program(model.program)
    _, device, _ = cache_of(model.program)
    with only_unmatched_in_both(None if encoder is None else unmatched):
        sliced_graph = slice_graph(graph, quantizer)
    program = decoder_program(sliced_graph, model.program, quantizer, device, images)
    parts = copy.deepcopy((model.config, model.generation_config))
    sliced = LanguageModel(program, *parts, model.processor or model.tokenizer, encoder)
    sliced.coverage = model.coverage
    return sliced


def _cache_format(graph: GraphModule) -> MXSpec | None:
    """Return the format of the codes that a decoder writes to its cache; None for a cache of values."""
    for _, call in Dequantize.calls_in(graph.graph):
        if call.codes.target is torch.ops.aten.index_copy_.default:
            return call.spec.replace(axis=-1)
    return None


def _warn_of_cache(cache: MXSpec, quantizer: MXQuantizer) -> None:
    """Warn where the recipe asks for another format of a quantized cache."""
    spec = quantizer.kv_cache
    if spec is not None and (spec.element, spec.block_size) != (cache.element, cache.block_size):
        warnings.warn(f"the cache stays in {cache}: slicing does not change it to the recipe's {spec}", stacklevel=3)
