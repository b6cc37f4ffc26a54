"""Checks of the arguments of language models, before the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra


def check_model(model: object) -> None:
    """`MXError` where it is no causal language model of transformers."""
    transformers = import_extra("transformers", "hf")
    if not isinstance(model, transformers.PreTrainedModel):
        raise MXError(f"expected a causal language model of transformers, not {type(model).__name__}")
    if model.config.is_encoder_decoder or not model.can_generate():
        raise MXError(
            f"{type(model).__name__} is no causal language model, which alone has a cache: export it by itself, as "
            "`pt2mx quantize --output NAME.pt2` does"
        )


def check_texts(texts: Sequence[Tensor], vocabulary: int) -> None:
    """`MXError` where one of them is no block of tokens, (B, S) int64."""
    if isinstance(texts, Tensor | str):
        raise MXError(
            f"texts must be a list of tokens, (B, S) int64 each, not one {type(texts).__name__}: pass [tokens]"
        )
    for text in texts:
        shape = tuple(text.shape) if isinstance(text, Tensor) else None
        if shape is None or text.dtype != torch.long or text.dim() != 2 or not text.numel():
            found = type(text).__name__ if shape is None else f"{text.dtype} of shape {shape}"
            raise MXError(f"texts must be tokens, (B, S) int64 each, not {found}: tokenize them first")
        if not 0 <= int(text.min()) <= int(text.max()) < vocabulary:
            raise MXError(f"texts hold tokens from {int(text.min())} to {int(text.max())}: the model has {vocabulary}")


def check_prompts(text: object, inputs: object, options: dict[str, Any]) -> list[str]:
    """The prompts in `text`; `MXError` where it is none, or there are tokens beside."""
    prompts = [text] if isinstance(text, str) else list(text) if isinstance(text, list | tuple) else []
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise MXError(f"text={text!r} must be a prompt or a list of prompts, none of them empty")
    beside = [name for name in ("input_ids", "attention_mask") if options.get(name) is not None]
    if beside := ["inputs"] * (inputs is not None) + beside:
        raise MXError(f"text and {beside[0]} say the same: give one of them")
    return prompts


def check_step(
    input_ids: object, attention_mask: Tensor | None, position_ids: Tensor | None, batch: int, taken: int, slots: int
) -> None:
    """`MXError` where tokens do not fit to the cache, or what is beside them does not fit to the tokens."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        found = f"{input_ids.dtype} of shape {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else input_ids
        raise MXError(f"input_ids must be tokens, (B, S) int64, not {found!r}")
    if not input_ids.numel():
        raise MXError(f"input_ids of shape {tuple(input_ids.shape)} hold no token: give one at least")
    if input_ids.shape[0] != batch:
        raise MXError(f"input_ids hold {input_ids.shape[0]} sequences, the cache {batch}: make another cache")
    length = taken + input_ids.shape[1]
    if length > slots:
        raise MXError(
            f"{taken} + {input_ids.shape[1]} tokens do not fit into a cache of {slots}: make one with "
            f"new_cache({batch}, tokens)"
        )
    for name, tensor, shape in (
        ("attention_mask", attention_mask, (batch, length)),
        ("position_ids", position_ids, tuple(input_ids.shape)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise MXError(f"{name} must be of shape {shape}, not {tuple(tensor.shape)}")
