"""Split transformers' stopping criteria: length and ends are known to a step, the host evaluates the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pt2mx.extras import import_extra

_criteria = import_extra("transformers.generation.stopping_criteria", "hf")

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
