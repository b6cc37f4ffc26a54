"""Perplexity: a language model judged by a text that it predicts, and by the predictions of the float model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.analysis.divergence import kl_divergence
from pt2mx.errors import MXError

#: tokens, (1, S) int64 -> logits (1, S, vocabulary)
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Perplexity:
    """Predictions of a text.

    Args:
        tokens: that were predicted.
        perplexity: exp of the mean negative log-likelihood of a token; Inf where that is above 709 nats, and where a
            token of the text is ruled out (a logit of -inf).
        divergence: the mean Kullback-Leibler divergence from the float model's prediction, nats; None without one.
        agreement: the share of tokens for which both find the same most likely; None without a float model.
    """

    tokens: int
    perplexity: float
    divergence: float | None = None
    agreement: float | None = None


@torch.no_grad()
def perplexity(predict: Predict, blocks: Iterable[Tensor], reference: Predict | None = None) -> Perplexity:
    """Predict each token of the blocks, (1, S) int64, but the first, from those before it in its block.

    Args:
        predict: the model.
        reference: the float model, to which its predictions are compared; None: to none.

    Raises:
        MXError: where no block has a second token.
    """
    tokens, loss, divergence, same = 0, 0.0, 0.0, 0
    for block in blocks:
        wanted = block[0, 1:]
        log = predict(block)[0, :-1].float().log_softmax(-1)  # (S - 1, vocabulary)
        wanted = wanted.to(log.device)
        tokens += len(wanted)
        loss += float(F.nll_loss(log, wanted, reduction="sum"))
        if reference is not None:
            exact = reference(block)[0, :-1].float().log_softmax(-1).to(log.device)
            divergence += float(kl_divergence(exact, log).sum())
            same += int((log.argmax(-1) == exact.argmax(-1)).sum())
    if not tokens:
        raise MXError("there is no token to predict: give blocks of at least two tokens")
    mean = torch.tensor(loss / tokens, dtype=torch.float64)
    compared = () if reference is None else (divergence / tokens, same / tokens)
    return Perplexity(tokens, float(mean.exp()), *compared)
