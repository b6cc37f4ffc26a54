"""Process logits and draw tokens in tensors of fixed shapes, with the results of transformers' processors to the bit.

A processor of transformers reads all tokens so far, a tensor that grows. Most use the scores alone: these are called
themselves. The others get functions here, which read a record of fixed shape instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from pt2mx.extras import import_extra

_processors = import_extra("transformers.generation.logits_process", "hf")


class History(Protocol):
    """The record of earlier tokens."""

    length: Tensor  #: (1,) int64, the number of tokens so far, padding included
    seen: Tensor | None  #: (B, vocabulary) bool, the tokens so far; None where no processor reads it


#: (B, vocabulary) float32 scores, record -> scores
Function = Callable[[Tensor, Any], Tensor]
_FILTER = ("filter_value", "min_tokens_to_keep")


@dataclass(frozen=True)
class Processor:
    """A function of scores. Processors of equal keys compute the same."""

    key: tuple[Hashable, ...]
    call: Function = field(compare=False)
    reads_seen: bool = False
    #: (B,) int64, the first tokens of each prompt that are not seen: padding
    ignored: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Choice:
    """The choice of the next token from logits."""

    processors: tuple[Processor, ...]
    samples: bool
    ends: tuple[int, ...]  #: the tokens that end a sequence
    pad: int | None  #: the token after the end; None: a sequence that has ended goes on
    records: bool = False  #: True where the scores are results, too

    @property
    def ignored(self) -> Tensor | None:
        """The number of first tokens of each prompt that count as not seen, (B,) int64; None: all are seen."""
        return next((one.ignored for one in self.processors if one.ignored is not None), None)

    @property
    def is_plain(self) -> bool:
        """True where the order of the logits alone decides."""
        return not (self.processors or self.samples or self.records)

    def scores(self, logits: Tensor, history: History) -> Tensor:
        """Return the processed scores of (B, vocabulary) logits, float32 unless the choice is plain."""
        for processor in self.processors:
            logits = processor.call(logits, history)
        return logits

    def weights(self, scores: Tensor) -> Tensor:
        """Return (B, vocabulary) numbers, the largest of which belongs to the chosen token.

        The quotient of probabilities and exponential numbers is how `torch.multinomial` draws: with the same state of
        the generator it draws the same tokens. It also checks its input, for which a GPU waits."""
        if not self.samples:
            return scores
        probabilities = scores.softmax(-1)
        return probabilities / torch.empty_like(probabilities).exponential_(1)


def processors_of(processors: Iterable[Any]) -> tuple[Processor, ...] | None:
    """Return the functions of transformers' processors; None where one has none, such as a class of the user."""
    functions = [_function_of(one) for one in processors]
    known = tuple(one for one in functions if one is not None)
    one_record = sum(one.reads_seen for one in known) < 2 or all(one.ignored is None for one in known)
    return known if len(known) == len(functions) and one_record else None


def _function_of(processor: Any) -> Processor | None:
    name = type(processor).__name__
    is_known = name in _TABLE and getattr(_processors, name, None) is type(processor)
    return _TABLE[name](processor) if is_known else None


def _of_scores(*attributes: str) -> Callable[[Any], Processor]:
    """Return the function of a processor that reads the scores alone; `attributes` decide what it computes."""

    def build(processor: Any) -> Processor:
        values = [getattr(processor, name) for name in attributes]
        return Processor((type(processor).__name__, *values), lambda scores, history: processor(None, scores))

    return build


def _repetition(processor: Any) -> Processor | None:
    ignored = processor.prompt_ignore_length  # of a prompt's padding, in newer versions of transformers
    if ignored is not None and not isinstance(ignored, Tensor):
        return None
    penalty = processor.penalty

    def penalize(scores: Tensor, history: History) -> Tensor:
        seen = cast(Tensor, history.seen)  # for `reads_seen`
        return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    return Processor(("repetition", penalty), penalize, reads_seen=True, ignored=ignored)


def _no_end_before(least: int, ends: Tensor) -> Processor:
    columns = _columns_of(ends)

    def suppress(scores: Tensor, history: History) -> Tensor:
        at = columns(scores.shape[-1], scores.device)
        return scores.index_copy(-1, at, torch.where(history.length < least, -math.inf, scores[:, at]))

    return Processor(("no end before", least, *ends.tolist()), suppress)


def _suppressed(processor: Any) -> Processor:
    columns = _columns_of(processor.suppress_tokens)

    def suppress(scores: Tensor, history: History) -> Tensor:
        return scores.index_fill(-1, columns(scores.shape[-1], scores.device), -math.inf)

    return Processor(("suppressed", *processor.suppress_tokens.tolist()), suppress)


def _columns_of(tokens: Tensor) -> Callable[[int, torch.device], Tensor]:
    """Return a function of the size of a vocabulary and of a device: those of `tokens` that are in the vocabulary.

    It makes the tensor once, because a GPU would wait for the copy."""

    @functools.cache
    def columns(vocabulary: int, device: torch.device) -> Tensor:
        known = sorted({token for token in tokens.tolist() if 0 <= token < vocabulary})
        return torch.tensor(known, dtype=torch.long, device=device)

    return columns


#: class of transformers -> the function of a processor
_TABLE: dict[str, Callable[[Any], Processor | None]] = {
    "TemperatureLogitsWarper": _of_scores("temperature"),
    "TopKLogitsWarper": _of_scores("top_k", "filter_value"),
    "TopPLogitsWarper": _of_scores("top_p", *_FILTER),
    "MinPLogitsWarper": _of_scores("min_p", *_FILTER),
    "TypicalLogitsWarper": _of_scores("mass", *_FILTER),
    "EpsilonLogitsWarper": _of_scores("epsilon", *_FILTER),
    "InfNanRemoveLogitsProcessor": _of_scores(),
    "LogitNormalization": _of_scores(),
    "RepetitionPenaltyLogitsProcessor": _repetition,
    "MinLengthLogitsProcessor": lambda one: _no_end_before(one.min_length, one.eos_token_id),
    "MinNewTokensLengthLogitsProcessor": lambda one: _no_end_before(
        one.prompt_length_to_skip + one.min_new_tokens, one.eos_token_id
    ),
    "SuppressTokensLogitsProcessor": _suppressed,
}
