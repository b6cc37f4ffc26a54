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
    """The stopping criteria of one call with prompts, (B, S) int64."""

    def __init__(self, criteria: Iterable[Any], ids: Tensor) -> None:
        #: the length of the longest text; None: no limit
        self.longest: int | None = None
        #: the tokens that end a sequence
        self.ends: tuple[int, ...] = ()
        #: True where sequences that have ended go on with padding
        self.pads = False
        #: True where the host ends single sequences
        self.ends_rows = False
        warns, others, moves = [], [], True
        for criterion in criteria:
            kind = type(criterion)
            self.pads |= hasattr(criterion, "eos_token_id")
            if kind is _criteria.MaxLengthCriteria:
                length, known = criterion.max_length, criterion.max_position_embeddings
                self.longest = length if self.longest is None else min(self.longest, length)
                if known and length > known:
                    warns.append(criterion)  # it warns of texts longer than the model was made for
            elif kind is _criteria.EosTokenCriteria:
                self.ends += tuple(criterion.eos_token_id.tolist())
            else:
                others.append(criterion)
                self.ends_rows |= kind not in _OF_ALL
                moves &= kind in _ON_ANY_DEVICE
        self._on_host = _criteria.StoppingCriteriaList([*warns, *others])
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
    """Generate tokens after prompts, (B, S) int64, up to a length; return the result of transformers' `_sample`.

    The host sees the end of the last sequence after it has queued another step, which it takes back: its token, its
    scores, its slot in the cache and its random numbers. It does the same when a criterion or the streamer raises.

    The step has begun; `logits` are of the last token of each prompt, (B, 1, vocabulary)."""
    total, cache = longest - ids.shape[1], step.cache
    waits = stopping.ends_rows and len(ids) > 1  # the padding after an end is an input of the next step
    behind = 0 if waits else BEHIND.get(cache.layers[0].tensors[0].device.type, 0)
    alive = torch.ones(len(ids), dtype=torch.bool, device="cpu")
    tokens: list[Tensor] = []
    raw_scores: list[Tensor] = []
    scores: list[Tensor] = []
    random: deque[Tensor] = deque(maxlen=MOST_BEHIND + 1)
    queued = 0
    try:
        while len(tokens) < total and bool(alive.any()):
            while queued < total and queued - len(tokens) <= behind:
                if behind and step.choice.samples:
                    random.append(step.generator.get_state())
                raw, processed = step.run() if queued else step.choose(logits)
                step.send()
                queued += 1
                if step.choice.records:
                    raw_scores.append(raw.clone())
                    scores.append(processed.clone())
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
        extra = queued - max(len(tokens), 1)
        if extra > 0:
            cache.advance(-extra)
            if random:
                step.generator.set_state(random[-extra])
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([ids, torch.stack(tokens, 1).to(ids.device)], 1)
    if not config.return_dict_in_generate:
        return sequences
    count = len(tokens)
    return _generation.GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(scores[:count]) if config.output_scores else None,
        logits=tuple(raw_scores[:count]) if config.output_logits else None,
        **{CACHE: cache},
    )
