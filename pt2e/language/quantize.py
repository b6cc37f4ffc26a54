"""`quantize_language_model`: export and quantize a language model of transformers, with its cache."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from pt2mx.algorithms.options import Rotation, folded_rotation
from pt2mx.errors import MXError
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.pt2e.flow.prepare import check_quantizer
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.arguments import LONGEST_TEXT, check_model, check_texts
from pt2mx.pt2e.language.cache import has_source
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.language.quantize_encoder import float_inputs_of, tokens_of
from pt2mx.pt2e.language.quantize_graph import (
    check_training,
    decoder_program,
    divergence_of_logits,
    only_unmatched_in_both,
    quantize_graph,
    without_activation_matmuls,
)
from pt2mx.pt2e.language.rope import longest_text
from pt2mx.pt2e.language.tensor_parallel import check_blocks
from pt2mx.pt2e.language.vision import check_tower, check_trains, has_tower
from pt2mx.pt2e.models.coverage import CheckpointValues, Coverage, tensors_read
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: tokens on which the float model is compared with itself after a change of its weights
_SHORT = 16


def quantize_language_model(
    model: PreTrainedModel,
    quantizer: MXQuantizer,
    texts: Sequence[Tensor | Mapping[str, Tensor]] = (),
    tokenizer: Any = None,
    stage: Callable[[str], None] = lambda name: None,
    *,
    part: str | None = None,
    allow_partial: bool = False,
    length: int | None = None,
    lessons: Sequence[Tensor] = (),
    training: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Export a language model with its cache, and quantize its weights and the inputs multiplied with them.

    A model with a vision tower becomes two programs: the tower with its projection, and the decoder.

    Matmuls of two activations stay in high precision. In attention, blocks would run along the cache and change with
    each token; other such matmuls compute the angles of positions.

    Args:
        model: a model of transformers in evaluation mode, or the result of `shard`. It is not changed.
        quantizer: the quantizer; its algorithms run as in `pt2mx.optimize`.
        texts: tokens to calibrate with, (B, S) int64 each, without padding; for a model with a vision tower also what
            its processor gives for prompts with images; for a model of audio its features or samples. The decoder of an
            encoder-decoder is calibrated with the text that the model generates from them.
        tokenizer: the tokenizer of the result.
        stage: called with the name of each stage as it begins.
        part: the top-level module to put into the program, such as "language_model" for text without images; the others
            may be left out.
        allow_partial: True: the program may leave out any part that text does not reach.
        length: the tokens of the longest text, for a model with RoPE of the types "longrope" and "dynamic": the program
            has the frequencies for that length. None: those for short texts. Other models read any number of tokens.
        lessons: tokens, (B, S) int64 each, on which `pt2mx.distill` trains the quantized decoder to predict like the
            float one (`kl_div`), after its algorithms; thousands of texts once. Of an encoder-decoder they are sources,
            as `texts` are, and train its encoder to return what the float one does.
        training: options of `pt2mx.distill` by name, such as `{"lr": 1e-4, "group": torch.distributed.group.WORLD}`.

    Returns:
        A model that generates and can be saved; its `coverage` is the share of the model's values that it holds.

    Raises:
        MXError: for a model that keeps anything but keys and values of its tokens, entries of compressed tokens and the
            states of recurrences; for one with parts, other than unused heads, that tokens and images do not reach; for
            a vision tower that cannot be exported, or lessons for one; for texts of more tokens than the model has
            positions; for a model into whose weights `Rotation(online=False)` cannot be folded, with the operator that
            prevents it; and as each stage does.

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
    check_quantizer(quantizer, MXQuantizer)
    check_model(model)
    for given in (texts, lessons):
        check_texts(given, model.config.get_text_config().vocab_size, model.main_input_name)
    check_training(training or {}, len(lessons))
    if lessons:
        check_trains(model, part)
    stage("export")
    length = longest_text(model, length)
    layers = layers_of(model)
    if part is None and not allow_partial:
        check_tower(model)
    rotation = folded_rotation(quantizer.algorithms or ())
    if rotation is not None and (has_source(layers) or (part is None and has_tower(model))):
        quantizer, rotation = _unrotated(quantizer, rotation), None
    inputs = float_inputs_of(model, layers, part)
    exported = decoder.export_decoder(model, length, inputs.images)
    inputs.check(exported, [*texts, *lessons])
    coverage = _coverage(model, exported, inputs.encoder)
    coverage.check(part, allow_partial)

    # reports count the parameters of the float model: without the parts that the program leaves out
    graph = remove_unused(exported.module(check_guards=False))
    quantizer = without_activation_matmuls(quantizer)
    check_blocks(graph, quantizer)
    if lessons and inputs.encoder is not None:
        stage("distill")
    encoder = inputs.quantized_encoder(quantizer, texts, lessons, training)
    batches = [inputs.read(text) for text in texts]
    of_decoder = [] if inputs.encoder is not None else [tokens_of(lesson) for lesson in lessons]
    lesson_batches = decoder.TextInputs(layers, model.device, of_decoder)
    example = None if rotation is None else inputs.read(_short_text(model))
    with only_unmatched_in_both(inputs.unmatched):
        converted = quantize_graph(
            graph, quantizer, batches, stage, lesson_batches, example, training, divergence_of_logits
        )
    program = decoder_program(converted, exported, quantizer, model.device, inputs.images)

    config = copy.deepcopy(model.config)
    if rotation is not None:  # the head has the gain of the last norm, and is no longer the embedding
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    if length is not None:
        setattr(config, LONGEST_TEXT, length)
    language_model = LanguageModel(program, config, copy.deepcopy(model.generation_config), tokenizer, encoder)
    language_model.coverage = coverage
    return language_model


def _unrotated(quantizer: MXQuantizer, rotation: Rotation) -> MXQuantizer:
    """Return a quantizer without a rotation that is folded into weights."""
    reason = "rotations are folded into the weights of decoders of text alone"
    if rotation.strict:
        raise MXError(f"{reason}: leave Rotation(online=False) out for a model with an encoder or a tower")
    warnings.warn(f"the weights stay without rotations: {reason}", stacklevel=3)
    others = [algorithm for algorithm in quantizer.algorithms or () if algorithm is not rotation]
    return quantizer.with_configs(lambda kind, key, config: config).set_algorithms(others or None)


def _coverage(model: PreTrainedModel, *programs: ExportedProgram | None) -> Coverage:
    """Return the share of a model's values that programs read."""
    read = set[str]()
    for program in programs:
        if program is not None:
            read |= tensors_read(program, decoder.PREFIX)
    return CheckpointValues(model).held_by(read)


def _short_text(model: PreTrainedModel) -> Tensor:
    """Return tokens from the whole vocabulary: the first ones are special, and in 16 bits their logits are inexact."""
    return torch.arange(_SHORT)[None] * (model.config.get_text_config().vocab_size // _SHORT)
