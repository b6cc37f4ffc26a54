"""Score and continue texts in batches: log-likelihoods of continuations, and text up to a stop string."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pt2mx.extras import import_extra
from pt2mx.pt2e.language.arguments import LONGEST_TEXT
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.texts import padded, until_stop

_criteria = import_extra("transformers.generation.stopping_criteria", "hf")

Tokens = Sequence[int]

#: columns of logits in memory at once
_COLUMNS = 1024
#: the length of texts for models that state none, such as recurrent ones
_LENGTH = 2048


def context_length(model: LanguageModel) -> int:
    """Return the number of tokens that a model reads at most."""
    text = model.config.get_text_config(decoder=True)
    longest = getattr(model.config, LONGEST_TEXT, None) or getattr(text, "max_position_embeddings", None)
    return int(longest or _LENGTH)


def rolling_pairs(tokens: Tokens, prefix: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield contexts and continuations that predict each token of a text once.

    The model reads at most `length` tokens of a pair; the last pair has as much context as fits.

    Args:
        tokens: the text.
        prefix: the token before the text.
        length: the number of tokens that the model reads at once.
    """
    text = [prefix, *tokens]
    for first in range(0, len(tokens), length):
        last = min(first + length, len(tokens))
        yield text[max(0, last - length) : first + 1], list(tokens[first:last])


@torch.no_grad()
def log_likelihoods(
    model: LanguageModel, pairs: Sequence[tuple[Tokens, Tokens]], batch_size: int = 1
) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each continuation after its context, and whether greedy search would choose it.

    Texts are padded on the right, where no token sees the padding. The model reads equal texts once: answers of one
    token to the same question differ only in the token that it predicts.

    Args:
        model: the model.
        pairs: contexts, of one token or more, and continuations.
        batch_size: the number of texts that the model reads at once.
    """
    owners: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(pairs):
        owners.setdefault((*context, *continuation[:-1]), []).append(index)
    sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
    distinct = list(owners)
    for batch in _batches(distinct, batch_size, "score"):
        texts = [distinct[index] for index in batch]
        jobs = [(row, index, pairs[index][1]) for row, text in enumerate(texts) for index in owners[text]]
        starts = [len(texts[row]) - len(continuation) for row, _, continuation in jobs]
        for first, logits in _logits(model, texts, min(starts)):
            for (row, index, continuation), start in zip(jobs, starts, strict=True):
                begin, end = max(start, first), min(len(texts[row]), first + logits.shape[1])
                if begin < end:
                    log = logits[row, begin - first : end - first].float().log_softmax(-1)  # (T, vocabulary)
                    target = torch.tensor(continuation[begin - start : end - start], device=log.device)  # (T,)
                    sums[index] += float(log.gather(1, target[:, None]).double().sum())
                    greedy[index] &= bool((log.argmax(-1) == target).all())
    return list(zip(sums, greedy, strict=True))


def _batches(texts: Sequence[Tokens], size: int, name: str) -> Iterator[list[int]]:
    """Yield the indices of texts in batches, the longest texts first, and show a progress bar in a terminal."""
    ordered = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    for first in tqdm(range(0, len(ordered), size), desc=name, leave=False, disable=None, file=sys.stderr):
        yield ordered[first : first + size]


def _logits(model: LanguageModel, texts: Sequence[Tokens], begin: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits of the columns from `begin` on, (B, T, vocabulary), in parts, each with its first column."""
    tokens = padded(texts, "right")["input_ids"].to(model.device)
    cache = model.new_cache(*tokens.shape)
    for first, part in zip(range(0, tokens.shape[1], _COLUMNS), tokens.split(_COLUMNS, 1), strict=True):
        kept = torch.arange(min(max(begin - first, 0), part.shape[1] - 1), part.shape[1], device=model.device)
        output = model(part, past_key_values=cache, logits_to_keep=kept)
        yield first + int(kept[0]), output.logits


@torch.no_grad()
def continuations(
    model: LanguageModel,
    prompts: Sequence[Tokens],
    stops: Sequence[str] = (),
    length: int = 256,
    batch_size: int = 1,
    **options: Any,
) -> list[str]:
    """Continue prompts up to a stop string, which is not part of the result, or the end of the text.

    Args:
        model: the model, with its tokenizer.
        prompts: tokens, one or more each.
        stops: strings that end a text.
        length: the number of new tokens, at most.
        batch_size: the number of prompts that the model continues at once.
        **options: options of `generate`; by default it chooses the most likely token.
    """
    results = [""] * len(prompts)
    tokenizer, config = model.tokenizer, model.generation_config
    end = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
    pad = next(one for one in (config.pad_token_id, tokenizer.pad_token_id, end, 0) if one is not None)
    ends = {"eos_token_id": end, "pad_token_id": pad[0] if isinstance(pad, list) else pad}
    for batch in _batches(prompts, batch_size, "generate"):
        tokens, mask = (tensor.to(model.device) for tensor in padded([prompts[i] for i in batch]).values())  # (B, S)
        first = tokens.shape[1]
        criteria = [_StopStrings(tokenizer, stops, first)] if stops else []
        chosen = {"do_sample": False, **ends, **options, "stopping_criteria": criteria, "max_new_tokens": length}
        new = model.generate(tokens, attention_mask=mask, **chosen)[:, first:]
        for index, text in zip(batch, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            results[index] = until_stop(text, stops)
    return results


class _StopStrings(_criteria.StoppingCriteria):  # type: ignore[name-defined]
    """Stops a sequence at a string in its new tokens. The class of transformers also searches the prompt."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], first: int) -> None:
        self._tokenizer, self._stops, self._first = tokenizer, stops, first
        # a token has at least one byte; a tokenizer may strip the space before the first one
        self._longest = 1 + max(len(stop.encode()) for stop in stops)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        recent = input_ids[:, max(self._first, input_ids.shape[1] - self._longest) :]
        texts = self._tokenizer.batch_decode(recent, skip_special_tokens=True)
        ended = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(ended, device=input_ids.device)
