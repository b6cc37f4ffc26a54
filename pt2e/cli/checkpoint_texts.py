"""Built-in texts for the model of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.extras import import_extra
from pt2mx.pt2e.language.texts import sentences

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: texts of no meaning in a batch, and the tokens of each
_BATCH, _LENGTH = 2, 33


def _texts(config: PretrainedConfig, name: str, made: dict) -> dict[str, Tensor]:
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    tokens = _tokens(name, longest)
    if tokens is not None:
        ids = tokens["input_ids"]
        if ids.unique().numel() >= 8 and ids.max() < config.vocab_size:
            return {"input_ids": ids, "attention_mask": tokens["attention_mask"]}
    # no tokenizer, or one without a vocabulary: ids of no meaning
    ids = torch.randint(config.vocab_size, (_BATCH, min(_LENGTH, longest or _LENGTH)))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _tokens(name: str, longest: int | None) -> dict | None:
    transformers = import_extra("transformers", "hf")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        limits = {"padding": True, "truncation": longest is not None, "max_length": longest}
        return tokenizer(sentences()[:8], return_tensors="pt", return_attention_mask=True, **limits)
    except Exception:  # tokenizers fail in as many ways as there are of them
        return None


def _decoder_texts(config: PretrainedConfig, name: str, made: dict) -> dict[str, Tensor]:
    if "input_ids" in made:
        return {"decoder_input_ids": made["input_ids"].clone()}
    return {"decoder_input_ids": torch.randint(config.get_text_config().vocab_size, (_BATCH, _LENGTH // 4))}


#: input -> a function that makes it, and what belongs to it, from the config, the checkpoint's name and the inputs made
#: before
TEXTS: dict[str, Callable[[PretrainedConfig, str, dict], dict[str, Tensor]]] = {
    "input_ids": _texts,
    "decoder_input_ids": _decoder_texts,
}
