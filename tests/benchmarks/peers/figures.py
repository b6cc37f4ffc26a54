"""The scores of a quantized model for each window, compared with the float model, and the figures of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from pt2mx.pt2e.language.texts import perplexity

Cells = dict[str, str]
#: score -> its value for each window
Scores = dict[str, list[float]]
#: outputs, windows, outputs of the float model -> scores
Scoring = Callable[[Iterable[Tensor], Sequence[Tensor], Sequence[Tensor]], Scores]


class Metric(NamedTuple):
    """How outputs are compared with the outputs of the float model.

    Args:
        scores: the scores of outputs.
        cells: scores -> the cells of the table.
        loss: the score by which methods are compared; lower is better.
    """

    scores: Scoring
    cells: Callable[[Scores], Cells]
    loss: str


@torch.no_grad()
def divergences(outputs: Iterable[Tensor], windows: Sequence[Tensor], references: Sequence[Tensor]) -> Scores:
    """Return log-perplexity, KL divergence from the float model in nats, and the share of equal argmax.

    Args:
        outputs: logits (1, S, vocabulary) for each window.
        windows: the text, (1, S) int64 each, of one length.
        references: the logits of the float model for each window.
    """
    rows = [
        perplexity(lambda _, logits=logits: logits, [window], lambda _, exact=exact: exact)
        for logits, window, exact in zip(outputs, windows, references, strict=True)
    ]
    scores = {"log-perplexity": [math.log(row.perplexity) for row in rows]}
    return {**scores, "KL": [row.divergence or 0.0 for row in rows], "same": [row.agreement or 0.0 for row in rows]}


def divergence_cells(scores: Scores) -> Cells:
    return {
        "perplexity": f"{math.exp(_mean(scores['log-perplexity'])):.2f}",
        "KL, 95% interval": mean_text(scores["KL"]),
        "same argmax": f"{_mean(scores['same']):.1%}",
    }


@torch.no_grad()
def cosines(outputs: Iterable[Tensor], windows: Sequence[Tensor], references: Sequence[Tensor]) -> Scores:
    """Return 1 - cosine to the float model's output, and whether the largest values agree.

    Args:
        outputs: an embedding or logits (1, width) for each window.
        windows: the inputs.
        references: the output of the float model for each window.
    """
    pairs = list(zip(outputs, references, strict=True))
    losses = [max(0.0, 1 - float(cosine_similarity(output, reference))) for output, reference in pairs]
    return {"1 - cosine": losses, "same": [float(o.argmax() == reference.argmax()) for o, reference in pairs]}


def embedding_cells(scores: Scores) -> Cells:
    losses = scores["1 - cosine"]
    return {"1 - cosine, 95% interval": mean_text(losses), "worst": f"{1 - max(losses):.4f}"}


def class_cells(scores: Scores) -> Cells:
    return {**embedding_cells(scores), "same class": f"{_mean(scores['same']):.0%}"}


DIVERGENCE = Metric(divergences, divergence_cells, "KL")
EMBEDDING = Metric(cosines, embedding_cells, "1 - cosine")
CLASSES = Metric(cosines, class_cells, "1 - cosine")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """Return a mean and its bootstrap interval as text, with "+" as `sign` for positive values."""
    low, high = bootstrap_interval(values)
    return f"{_mean(values):{sign}.4f} ({low:{sign}.4f} to {high:{sign}.4f})"


def difference_text(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the mean of `values - others`, window by window, and its bootstrap interval as text.

    A window that is hard for one method is hard for the other. The interval of their differences is therefore narrower
    than the intervals of two means tell.
    """
    return mean_text([value - other for value, other in zip(values, others, strict=True)], "+")


def bootstrap_interval(values: Sequence[float], share: float = 0.95, draws: int = 10000) -> tuple[float, float]:
    """Return the interval that holds the means of a share of samples, drawn from the values with replacement.

    Args:
        values: one value for each window.
        share: the share of the means.
        draws: the number of samples.
    """
    sample = torch.randint(len(values), (draws, len(values)), generator=torch.Generator().manual_seed(0))
    means = torch.tensor(values, dtype=torch.float64)[sample].mean(1)
    low, high = means.quantile(torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)).tolist()
    return low, high
