"""Run a `Step` for each token, and read the tokens on the host: on a GPU one step behind, so that it never waits.

A step knows the length and the ends of texts; the host evaluates transformers' other stopping criteria.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pt2mx.extras import import_extra
from pt2mx.pt2e.language.cache import CACHE
from pt2mx.pt2e.language.step import MOST_BEHIND, Step

_criteria = import_extra("transformers.generation.stopping_criteria", "hf")
_generation = import_extra("transformers.generation.utils", "hf")

#: type of device -> the steps that the host is behind
BEHIND = {"cuda": MOST_BEHIND}
#: they stop all sequences at once
_OF_ALL = (_criteria.MaxLengthCriteria, _criteria.MaxTimeCriteria)
#: they take tokens on any device
_ON_ANY_DEVICE = (*_OF_ALL, _criteria.StopStringCriteria)


class Stopping:
    """The stopping criteria of one call.

    Args:
        criteria: transformers' criteria.
        ids: (B, S) int64, the prompts.
    """

    def __init__(self, criteria: Iterable[Any], ids: Tensor) -> None:
        criteria = list(criteria)
        lengths = [one for one in criteria if type(one) is _criteria.MaxLengthCriteria]
        ends = [one for one in criteria if type(one) is _criteria.EosTokenCriteria]
        #: the length of the longest text; None: no limit
        self.longest: int | None = min((one.max_length for one in lengths), default=None)
        #: the tokens that end a sequence
        self.ends = tuple(int(token) for one in ends for token in one.eos_token_id)
        #: True where sequences that have ended go on with padding
        self.pads = any(hasattr(one, "eos_token_id") for one in criteria)
        # a criterion of the length warns of texts longer than the model was made for
        warns = [one for one in lengths if one.max_position_embeddings and one.max_length > one.max_position_embeddings]
        others = [one for one in criteria if one not in lengths and one not in ends]
        self._on_host = _criteria.StoppingCriteriaList([*warns, *others])
        #: True where the host ends single sequences
        self.ends_rows = not all(type(one) in _OF_ALL for one in others)
        moves = all(type(one) in _ON_ANY_DEVICE for one in others)
        self._ids = ids.cpu() if moves and self._on_host else ids

    def stops(self, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor | None:
        """Return which sequences the host ends after a token of each, (B,) bool on the host; None without criteria.

        Args:
            tokens: (B,) int64, on the host.
            scores: the scores of each token so far, or None.
        """
        if not self._on_host:
            return None
        self._ids = torch.cat([self._ids, tokens[:, None].to(self._ids.device)], 1)
        return self._on_host(self._ids, scores).cpu()


def choose_tokens(
    step: Step, logits: Tensor, ids: Tensor, longest: int, stopping: Stopping, config: Any, streamer: Any
) -> Any:
    """Generate tokens after prompts.

    The host sees the end of the last sequence after it has queued another step, which it takes back: its token, its
    scores, its slot in the cache and its random numbers. It does the same when a criterion or the streamer raises.

    Args:
        step: the step, which has begun.
        logits: (B, 1, vocabulary), of the last token of each prompt.
        ids: (B, S) int64, the prompts.
        longest: the length of the longest text.
        stopping: the stopping criteria.
        config: transformers' `GenerationConfig`.
        streamer: transformers' streamer, or None.

    Returns:
        The result of transformers' `_sample`.
    """
    total, cache = longest - ids.shape[1], step.cache
    waits = stopping.ends_rows and len(ids) > 1  # the padding after an end is an input of the next step
    behind = 0 if waits else BEHIND.get(cache.layers[0].tensors[0].device.type, 0)
    alive = torch.ones(len(ids), dtype=torch.bool, device="cpu")
    tokens: list[Tensor] = []
    raw: list[Tensor] = []
    scores: list[Tensor] = []
    random: deque[Tensor] = deque(maxlen=MOST_BEHIND + 1)
    queued = 0
    try:
        while len(tokens) < total and bool(alive.any()):
            while queued < total and queued - len(tokens) <= behind:
                if behind and step.choice.samples:
                    random.append(step.random_state())
                both = step.run() if queued else step.choose(logits)
                step.send()
                queued += 1
                if step.choice.records:
                    for kept, one in zip((raw, scores), both, strict=True):
                        kept.append(one.clone())
            new, unfinished = step.receive()
            tokens.append(new)
            of_tokens = tuple(scores[: len(tokens)]) if step.choice.records and config.output_scores else None
            stopped = stopping.stops(new, of_tokens)
            alive &= unfinished if stopped is None else unfinished & ~stopped
            if waits and stopped is not None:
                step.unfinished.copy_(alive)
            if streamer is not None:
                streamer.put(new)
    finally:
        if (extra := queued - max(len(tokens), 1)) > 0:
            cache.advance(-extra)
            if random:
                step.set_random_state(random[-extra])
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([ids, torch.stack(tokens, 1).to(ids.device)], 1)
    if not config.return_dict_in_generate:
        return sequences
    count = len(tokens)
    return _generation.GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(scores[:count]) if config.output_scores else None,
        logits=tuple(raw[:count]) if config.output_logits else None,
        **{CACHE: cache},
    )
