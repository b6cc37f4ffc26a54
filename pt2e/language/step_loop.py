"""Run a `Step` for each token, and read the tokens on the host: on a GPU one step behind, so that it never waits."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from pt2mx.extras import import_extra
from pt2mx.pt2e.language.cache_name import CACHE
from pt2mx.pt2e.language.step import MOST_BEHIND, Step
from pt2mx.pt2e.language.stopping import Stopping

_generation = import_extra("transformers.generation.utils", "hf")

#: type of device -> the steps that the host is behind
BEHIND = {"cuda": MOST_BEHIND}


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
