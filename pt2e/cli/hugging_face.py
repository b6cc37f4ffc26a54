"""Checkpoints of Hugging Face, with inputs made from their configs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.sentences import sentences

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: of the built-in inputs that are no sentences
_BATCH, _LENGTH = 2, 33


def load_checkpoint(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return the model of a checkpoint, and batches of keyword arguments.

    Args:
        name: a local folder, or a name on the hub.

    Raises:
        MXError: for a checkpoint that cannot be loaded, and a model with inputs of a kind that is not built in.
    """
    transformers = import_extra("transformers", "hf")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        architecture = (config.architectures or ["AutoModel"])[0]
        module = from_pretrained(getattr(transformers, architecture, transformers.AutoModel), name)
    except Exception as error:  # of any of the libraries that read a checkpoint
        raise MXError(
            f"{name!r} is no Hugging Face checkpoint that can be loaded (a local folder works offline): {error}"
        ) from None
    module.register_forward_hook(lambda module, inputs, output: output.to_tuple())  # loads without transformers
    for config in [part.config for part in module.modules() if hasattr(getattr(part, "config", None), "use_cache")]:
        config.use_cache = False  # a cache is no tensor, and export takes tensors
    torch.manual_seed(0)
    return module, _batches(module, name)


def from_pretrained(architecture: type[PreTrainedModel], name: str | os.PathLike[str]) -> PreTrainedModel:
    """Return `architecture.from_pretrained(name)` for evaluation, loaded without a progress bar."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return architecture.from_pretrained(name).eval()


def _batches(module: PreTrainedModel, name: str) -> list[dict[str, Tensor]]:
    taken, inputs = inspect.signature(module.forward).parameters, [module.main_input_name]
    if "return_loss" in taken and "pixel_values" in taken:  # texts and images are compared (CLIP, SigLIP)
        inputs = ["input_ids", "pixel_values"]
    if module.config.is_encoder_decoder and "decoder_input_ids" in taken:
        inputs.append("decoder_input_ids")
    batches = [_batch(module, name, inputs) for _ in range(1 if "input_ids" in inputs else 2)]
    return [{key: batch[key] for key in taken if key in batch} for batch in batches]


def _batch(module: PreTrainedModel, name: str, inputs: list[str]) -> dict[str, Tensor]:
    """Return one batch with the inputs that are named, and what belongs to them."""
    made: dict[str, Tensor] = {}
    for key in inputs:
        found = _INPUTS[key](module.config, name, made) if key in _INPUTS else None
        if found is None:
            raise MXError(
                f"{name}: no built-in inputs for {key!r} of {type(module).__name__}: give --model module.py:factory, a "
                "function that returns the model and example inputs"
            )
        floats = {k: t.to(module.dtype) if t.is_floating_point() else t for k, t in found.items()}
        made.update(floats)
    return made


def _texts(config: PretrainedConfig, name: str, made: dict) -> dict[str, Tensor]:
    config, tokens = config.get_text_config(), _tokens(name)
    longest = getattr(config, "max_position_embeddings", None) or _LENGTH
    if tokens is not None:
        ids = tokens["input_ids"]
        if ids.unique().numel() >= 8 and ids.max() < config.vocab_size and ids.shape[1] <= longest:
            return {key: tokens[key] for key in ("input_ids", "attention_mask")}
    # no tokenizer, or one without a vocabulary: ids of no meaning
    ids = torch.randint(config.vocab_size, (_BATCH, min(_LENGTH, longest)))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _tokens(name: str) -> dict | None:
    transformers = import_extra("transformers", "hf")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        return tokenizer(sentences()[:8], padding=True, return_tensors="pt")
    except Exception:  # tokenizers fail in as many ways as there are of them
        return None


def _decoder_texts(config: PretrainedConfig, name: str, made: dict) -> dict[str, Tensor]:
    if "input_ids" in made:
        return {"decoder_input_ids": made["input_ids"].clone()}
    return {"decoder_input_ids": torch.randint(config.get_text_config().vocab_size, (_BATCH, _LENGTH // 4))}


def _images(config: PretrainedConfig, name: str, made: dict) -> dict[str, Tensor]:
    config = getattr(config, "vision_config", getattr(config, "encoder", config))
    size = getattr(config, "image_size", 224)
    size = size if isinstance(size, tuple | list) else (size, size)
    return {"pixel_values": torch.randn(_BATCH, getattr(config, "num_channels", 3), *size)}


def _spectrograms(config: PretrainedConfig, name: str, made: dict) -> dict[str, Tensor] | None:
    """Return spectrograms as Whisper takes them: of one length, which two convolutions halve."""
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        return None
    return {"input_features": torch.randn(_BATCH, config.num_mel_bins, 2 * config.max_source_positions)}


#: input -> a function that makes it, and what belongs to it, from the config, the checkpoint's name and the inputs made
#: before; it returns None for a config that it cannot read
_INPUTS: dict[str, Callable[[PretrainedConfig, str, dict], dict[str, Tensor] | None]] = {
    "input_ids": _texts,
    "pixel_values": _images,
    "input_features": _spectrograms,
    "decoder_input_ids": _decoder_texts,
}
