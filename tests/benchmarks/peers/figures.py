"""The figures of a language model on windows of text: perplexity, and the divergence from the float model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pt2mx.pt2e.language.texts import Predict, perplexity


class Figures(NamedTuple):
    """The figures of a model.

    Args:
        perplexity: over the tokens of all windows.
        divergence: the mean KL divergence from the float model of each window, nats.
        agreement: the share of tokens for which both models predict the same.
    """

    perplexity: float
    divergence: tuple[float, ...]
    agreement: float

    def row(self) -> dict[str, str]:
        """Return the cells of the table."""
        low, high = bootstrap_interval(self.divergence)
        mean = sum(self.divergence) / len(self.divergence)
        kl = f"{mean:.4f} ({low:.4f} to {high:.4f})"
        return {"perplexity": f"{self.perplexity:.2f}", "KL, 95% interval": kl, "same argmax": f"{self.agreement:.1%}"}


def figures(predict: Predict, windows: Sequence[Tensor], references: Sequence[Tensor]) -> Figures:
    """Compare a model with the float model.

    Args:
        predict: the model.
        windows: the text, (1, S) int64 each, of one length.
        references: the logits of the float model for each window, (1, S, vocabulary).
    """
    rows = [
        perplexity(predict, [window], lambda _, logits=logits: logits)
        for window, logits in zip(windows, references, strict=True)
    ]
    loss = sum(math.log(row.perplexity) for row in rows) / len(rows)
    divergence = tuple(float(row.divergence or 0) for row in rows)
    return Figures(math.exp(loss), divergence, sum(row.agreement or 0 for row in rows) / len(rows))


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
