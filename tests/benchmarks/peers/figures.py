"""The scores of a quantized model for each window, compared with the float model, and the figures of a table."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, kl_div, normalize

from pt2mx.pt2e.language.texts import perplexity

Cells = dict[str, str]
#: the values of a score: one for each window, or a list of them for each seed
Values = Sequence[float] | Sequence[Sequence[float]]
#: score -> its value for each window
Scores = dict[str, list[float]]
#: outputs, windows, outputs of the float model -> scores
Scoring = Callable[[Iterable[Tensor], Sequence[Tensor], Sequence[Tensor]], Scores]


class Metric(NamedTuple):
    """How outputs are compared with the outputs of the float model.

    Args:
        scores: the scores of outputs.
        cells: scores of one seed or of several -> the cells of the table.
        loss: the score by which methods are compared; lower is better.
    """

    scores: Scoring
    cells: Callable[[Mapping[str, Values]], Cells]
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


def divergence_cells(scores: Mapping[str, Values]) -> Cells:
    return {
        "perplexity": f"{math.exp(mean(scores['log-perplexity'])):.2f}",
        "KL, 95% interval": mean_text(scores["KL"]),
        "same argmax": f"{mean(scores['same']):.1%}",
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


def embedding_cells(scores: Mapping[str, Values]) -> Cells:
    losses = scores["1 - cosine"]
    return {"1 - cosine, 95% interval": mean_text(losses), "worst": f"{1 - float(_by_seed(losses).max()):.4f}"}


@torch.no_grad()
def embeddings(outputs: Iterable[Tensor], windows: Sequence[Tensor], references: Sequence[Tensor]) -> Scores:
    """Return the scores of `cosines`, and for each window how its embedding orders the other windows by cosine.

    - "ranking": Spearman's correlation with the order of the float model.
    - "first": whether the other half of its text, window i ^ 1, comes first.
    - "reciprocal rank": 1 over the place of that half.

    Args:
        outputs: an embedding (1, width) for each window.
        windows: the inputs; 2i and 2i + 1 are halves of one text.
        references: the embedding of the float model for each window.
    """
    outputs = [*outputs]
    found, exact = map(_others, (outputs, references))
    half = torch.arange(len(outputs)) // 2 * 2  # its place among the others
    place = 1 + (found > found.gather(1, half[:, None])).sum(1).double()
    scores = {"ranking": _spearman(found, exact), "first": (place == 1).double(), "reciprocal rank": 1 / place}
    return {**cosines(outputs, windows, references), **{name: values.tolist() for name, values in scores.items()}}


def _others(outputs: Sequence[Tensor]) -> Tensor:
    """Return the cosine of each output, (1, width), to the n - 1 others in their order, (n, n - 1)."""
    unit = normalize(torch.cat([*outputs]).cpu().double())
    return (unit @ unit.mT)[~torch.eye(len(unit), dtype=torch.bool)].view(len(unit), -1)


def _spearman(values: Tensor, others: Tensor) -> Tensor:
    """Return Spearman's rank correlation of each row, (rows,), of values without ties, (rows, columns)."""
    ranks = (table.argsort(1).argsort(1).double() for table in (values, others))
    return cosine_similarity(*(rank - rank.mean(1, keepdim=True) for rank in ranks))


@torch.no_grad()
def classes(outputs: Iterable[Tensor], windows: Sequence[Tensor], references: Sequence[Tensor]) -> Scores:
    """Return the scores of `cosines`, and the KL divergence from the float model's classes in nats.

    Args:
        outputs: logits (1, classes) for each window.
        windows: the images.
        references: the logits of the float model for each window.
    """
    outputs = [*outputs]
    pairs = ([logits.double().log_softmax(1) for logits in pair] for pair in zip(outputs, references, strict=True))
    divergences = [float(kl_div(found, exact, reduction="sum", log_target=True)) for found, exact in pairs]
    return {**cosines(outputs, windows, references), "KL": divergences}


def class_cells(scores: Mapping[str, Values]) -> Cells:
    return {**embedding_cells(scores), "KL": mean_text(scores["KL"]), "same class": mean_text(scores["same"])}


def retrieval_cells(scores: Mapping[str, Values]) -> Cells:
    names = {"ranking": "ranking", "recall@1": "first", "MRR": "reciprocal rank"}
    return {**embedding_cells(scores), **{name: mean_text(scores[score]) for name, score in names.items()}}


DIVERGENCE = Metric(divergences, divergence_cells, "KL")
EMBEDDING = Metric(embeddings, retrieval_cells, "1 - cosine")
CLASSES = Metric(classes, class_cells, "1 - cosine")


def mean(values: Values) -> float:
    """Return the mean over windows and seeds."""
    return float(_by_seed(values).mean())


def mean_text(values: Values, sign: str = "") -> str:
    """Return a mean and its bootstrap interval as text, with "+" as `sign` for positive values."""
    low, high = bootstrap_interval(values)
    return f"{mean(values):{sign}.4f} ({low:{sign}.4f} to {high:{sign}.4f})"


def difference_text(values: Values, others: Values) -> str:
    """Return the mean of `values - others`, window by window, and its bootstrap interval as text.

    A window that is hard for one method is hard for the other. The interval of their differences is therefore narrower
    than the intervals of two means tell. A method of one seed is compared with each seed of the other.

    Raises:
        ValueError: for different numbers of windows.
    """
    pair = _by_seed(values), _by_seed(others)
    if pair[0].shape[1] != pair[1].shape[1]:
        raise ValueError(f"{pair[0].shape[1]} windows cannot be compared with {pair[1].shape[1]}")
    return mean_text((pair[0] - pair[1]).tolist(), "+")


def bootstrap_interval(values: Values, share: float = 0.95, draws: int = 10000) -> tuple[float, float]:
    """Return the interval that holds the means of a share of samples, drawn from the values with replacement.

    Args:
        values: one value for each window, or a list of them for each seed; a sample draws windows and seeds.
        share: the share of the means.
        draws: the number of samples.
    """
    table, generator = _by_seed(values), torch.Generator().manual_seed(0)
    seeds, windows = table.shape
    window = torch.randint(windows, (draws, 1, windows), generator=generator)
    seed = torch.randint(seeds, (draws, seeds, 1), generator=generator)
    means = table[seed, window].mean((1, 2))
    low, high = means.quantile(torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)).tolist()
    return low, high


def _by_seed(values: Values) -> Tensor:
    return torch.atleast_2d(torch.tensor(values, dtype=torch.float64))
