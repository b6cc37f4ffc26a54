"""Distances sample by sample: the error of their mean, and whether they rank two models.

The mean over samples is a ratio of two sums, such as noise over signal. Its error follows from the linearized ratio
(Cochran, Sampling Techniques, 3rd edition, 1977, section 6.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pt2mx.analysis.metrics import METRICS, Distance, batch_distance, distance_over, outputs_of, sum_of_pairs

#: fewest samples whose spread is known well enough to rank by it
LEAST_SAMPLES = 5
#: standard errors of half a 95 % interval, and of a difference that ranks two of many models
_INTERVAL, _RANK = 2.0, 3.0
#: with fewer samples, the share of the larger distance by which two must differ
_CLEAR = 0.5


def sample_distances(metric: str | Distance, output: Any, reference: Any) -> list[tuple[float, float]]:
    """Return the distance of each sample of a batch as a sum and its divisor.

    A sample is a slice along the first dimension. The batch is one sample if its outputs share no such dimension, and
    for a user's metric.
    """
    if callable(metric):
        return [batch_distance(metric, output, reference)]
    outputs, references = outputs_of(output), outputs_of(reference)
    sizes = {len(y) if y.dim() > 1 else 1 for y in references}
    if len(sizes) > 1 or sizes <= {0, 1}:
        return [distance_over(METRICS[metric], outputs, references)]
    distances = []
    for i in range(sizes.pop()):
        output_i = [y[i : i + 1] for y in outputs]
        reference_i = [y[i : i + 1] for y in references]
        distances.append(distance_over(METRICS[metric], output_i, reference_i))
    return distances


def mean_and_samples(pairs: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, ...]]:
    """Return the ratio of the sums, and for each sample a number; the ratio is their mean, and their spread its error.

    Args:
        pairs: the sum and the divisor of each sample.
    """
    total, count = sum_of_pairs(pairs)
    if not count:
        return math.nan, ()
    ratio, divisor = total / count, count / len(pairs)
    return ratio, tuple(ratio + (one - ratio * size) / divisor for one, size in pairs)


def half_interval(samples: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean; NaN for fewer than two samples."""
    return _INTERVAL * _standard_error(samples)


def can_rank(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return False if the samples of two models differ, but too little to tell which model is better.

    Args:
        a, b: the distances of the same samples in both; without samples nothing is known against the order.
    """
    if not a or len(a) != len(b) or list(a) == list(b):
        return True
    if len(a) < LEAST_SAMPLES:
        mean_a, mean_b = fmean(a), fmean(b)
        return not abs(mean_a - mean_b) < _CLEAR * max(abs(mean_a), abs(mean_b))  # also of NaN
    differences = [one - other for one, other in zip(a, b, strict=True)]
    return not abs(fmean(differences)) < _RANK * _standard_error(differences)


def _standard_error(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return math.nan
    mean = fmean(samples)
    return math.sqrt(sum((one - mean) ** 2 for one in samples) / (len(samples) - 1) / len(samples))
