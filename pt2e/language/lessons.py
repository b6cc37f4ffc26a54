"""`generate_lessons`: text that a language model writes itself, on which its quantized form is trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.errors import MXError, check_integer
from pt2mx.pt2e.language.arguments import check_model, check_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: texts that are written at the same time
_AT_ONCE = 64


@torch.no_grad()
def generate_lessons(
    model: PreTrainedModel, texts: Sequence[Tensor], *, prompt: int = 16, seed: int = 0, at_once: int = _AT_ONCE
) -> list[Tensor]:
    """Return text that a language model writes: as many tokens as `texts`, each row from its first tokens on.

    Distillation on it asks of the quantized model what the float one says (LLM-QAT, Liu et al., arXiv:2305.17888). Each
    token is drawn with the probability that the model gives it, without dropout and whatever its `generation_config`
    says; one that ends a text is never drawn. A call with another seed writes other lessons from the same beginnings.

    Args:
        model: a float decoder of transformers.
        texts: tokens, (B, S) int64 each, without padding. Those of at most `prompt` tokens stay as they are.
        prompt: the first tokens of each row, which stay.
        seed: a seed for the draws; the same arguments give the same tokens.
        at_once: rows that are written at the same time.

    Returns:
        Tokens of the shapes of `texts`, on the CPU.

    Raises:
        MXError: for a model that does not generate text from tokens, for texts of other tokens than its own, for a
            `seed` that is no integer, and for `prompt` or `at_once` below 1.

    Example:
        >>> import torch, transformers
        >>> from pt2mx import generate_lessons
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> config = transformers.LlamaConfig(**sizes, vocab_size=64, bos_token_id=1, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> (lesson,) = generate_lessons(model, [torch.arange(40)[None]])
        >>> lesson.shape, lesson[0, :16].equal(torch.arange(16))
        (torch.Size([1, 40]), True)
    """
    check_model(model)
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise MXError(f"{type(model).__name__} is no decoder of text: give one that writes from tokens")
    check_texts(texts, model.config.get_text_config().vocab_size, model.main_input_name)
    if not all(isinstance(text, Tensor) for text in texts):
        raise MXError("texts must be tokens, (B, S) int64 each, without other inputs")
    for name, number in (("prompt", prompt), ("at_once", at_once)):
        check_integer(name, number, 1)
    check_integer("seed", seed)
    devices = [model.device] if model.device.type == "cuda" else []
    with _by_probabilities_alone(model), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        written = list(_write(model, texts, prompt, at_once))
    return written


@contextmanager
def _by_probabilities_alone(model: PreTrainedModel) -> Iterator[None]:
    """Let a model generate without dropout, and of its own settings with the tokens alone that end a text."""
    config, training = model.generation_config, [module for module in model.modules() if module.training]
    model.generation_config = type(config)(eos_token_id=config.eos_token_id)
    model.eval()
    try:
        yield
    finally:
        model.generation_config = config
        for module in training:
            module.training = True


def _write(model: PreTrainedModel, texts: Sequence[Tensor], prompt: int, at_once: int) -> Iterator[Tensor]:
    """Yield the lessons; texts of one length share the calls."""
    for length, group in itertools.groupby(texts, lambda text: text.shape[1]):
        rows = list(group)
        tokens = torch.cat(rows).cpu()
        if length > prompt:
            parts = (part.to(model.device) for part in tokens[:, :prompt].split(at_once))
            tokens = torch.cat([_continued(model, part, length - prompt).cpu() for part in parts])
        yield from tokens.split([len(row) for row in rows])


def _continued(model: PreTrainedModel, tokens: Tensor, count: int) -> Tensor:
    # without these, transformers would take the likeliest token, or draw from the likeliest 50
    draws = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    length = {"min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
    result: Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), **draws, **length)
    return result
