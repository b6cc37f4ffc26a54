"""The Kullback-Leibler divergence of predicted distributions."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the divergence of q from p, the sum of p (log p - log q), in nats.

    An outcome with probability 0 in p (a masked logit: log p = -inf) adds nothing, even if q gives it 0 too. An outcome
    with probability 0 in q alone makes the divergence Inf.

    Args:
        log_p, log_q: (..., n), logarithms of probabilities that sum to 1 along the last dimension.

    Returns:
        (...,), NaN if either contains NaN.
    """
    p = log_p.exp()
    return torch.where((p == 0) & ~log_q.isnan(), 0, p * (log_p - log_q)).sum(-1)
