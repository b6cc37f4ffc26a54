"""The figures of a quantized model on windows of text, compared with the float model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from pt2mx.pt2e.language.texts import perplexity

Forward = Callable[[Tensor], Tensor]
Cells = dict[str, str]


@torch.no_grad()
def divergences(forward: Forward, windows: Sequence[Tensor], references: Sequence[Tensor]) -> Cells:
    """Return perplexity, KL divergence from the float model in nats with its interval, and the share of equal argmax.

    Args:
        forward: tokens, (1, S) int64 -> logits (1, S, vocabulary).
        windows: the text, (1, S) int64 each, of one length.
        references: the logits of the float model for each window.
    """
    rows = [
        perplexity(forward, [window], lambda _, logits=logits: logits)
        for window, logits in zip(windows, references, strict=True)
    ]
    loss = sum(math.log(row.perplexity) for row in rows) / len(rows)
    same = sum(row.agreement or 0 for row in rows) / len(rows)
    kl = [row.divergence or 0.0 for row in rows]
    return {"perplexity": f"{math.exp(loss):.2f}", "KL, 95% interval": mean_text(kl), "same argmax": f"{same:.1%}"}


@torch.no_grad()
def cosines(forward: Forward, windows: Sequence[Tensor], references: Sequence[Tensor]) -> Cells:
    """Return 1 - cosine to the float model's embedding with its interval, and the worst cosine.

    Args:
        forward: tokens, (1, S) int64 -> an embedding (1, width).
        windows: the texts, (1, S) int64 each.
        references: the embedding of the float model for each window.
    """
    pairs = zip(windows, references, strict=True)
    values = [float(cosine_similarity(forward(window), reference)) for window, reference in pairs]
    losses = [max(0.0, 1 - value) for value in values]
    return {"1 - cosine, 95% interval": mean_text(losses), "worst": f"{min(values):.4f}"}


def mean_text(values: Sequence[float]) -> str:
    """Return a mean and its bootstrap interval as text."""
    low, high = bootstrap_interval(values)
    return f"{sum(values) / len(values):.4f} ({low:.4f} to {high:.4f})"


def bootstrap_interval(values: Sequence[float], share: float = 0.95, draws: int = 10000) -> tuple[float, float]:
    """Return the interval that holds the means of a share of samples, drawn from the values with replacement.

    Args:
        values: one value for each window of text.
        share: the share of the means.
        draws: the number of samples.
    """
    sample = torch.randint(len(values), (draws, len(values)), generator=torch.Generator().manual_seed(0))
    means = torch.tensor(values, dtype=torch.float64)[sample].mean(1)
    low, high = means.quantile(torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)).tolist()
    return low, high
