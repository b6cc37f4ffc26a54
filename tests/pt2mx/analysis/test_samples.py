import math

import pytest
import torch

from pt2mx.analysis.metrics import mean_distance
from pt2mx.analysis.samples import can_rank, half_interval, mean_and_samples, sample_distances


@pytest.mark.parametrize("metric", ["kl", "cosine", "noise"])
@pytest.mark.parametrize("shape", [(6, 10), (3, 4, 10)])
def test_samples_add_up_to_the_batch(metric, shape):
    reference = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    output = reference + 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    pairs = sample_distances(metric, output, reference)
    assert len(pairs) == shape[0]
    mean, samples = mean_and_samples(pairs)
    assert math.isclose(mean, mean_distance(metric, [(output, reference)]), rel_tol=1e-9)
    assert math.isclose(sum(samples) / len(samples), mean, rel_tol=1e-9)
    one = sample_distances(metric, output[1:2], reference[1:2])
    assert pairs[1] == pytest.approx(one[0], rel=1e-9)


@pytest.mark.parametrize(
    "outputs",
    [torch.ones(4), torch.ones(1, 8), (torch.ones(2, 8), torch.ones(4, 8)), (torch.ones(2, 8), torch.ones(2))],
)
def test_outputs_without_a_dimension_of_samples_are_one(outputs):
    assert len(sample_distances("noise", outputs, outputs)) == 1


def test_a_users_metric_has_one_sample_per_batch():
    assert sample_distances(lambda output, reference: 3, torch.ones(4, 8), torch.ones(4, 8)) == [(3.0, 1.0)]


def test_the_interval_of_a_mean_and_of_a_ratio():
    values = [1.0, 2.0, 3.0, 6.0]
    assert math.isclose(half_interval(values), 2 * math.sqrt(sum((v - 3) ** 2 for v in values) / 3 / 4))
    assert math.isnan(half_interval([1.0])) and math.isnan(half_interval([]))
    ratio, samples = mean_and_samples([(2.0, 4.0), (3.0, 6.0), (4.0, 8.0)])
    assert ratio == 0.5 and half_interval(samples) == pytest.approx(0), "every sample has the same ratio"
    assert mean_and_samples([(0.0, 0.0)])[1] == ()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([3.06e-5], [3.16e-5], False),  # one sample
        ([3.06e-5], [9.16e-5], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.1, 2.1, 3.1, 4.1, 5.1, 6.2], True),  # each is worse
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.5, 1.8, 3.5, 3.4, 5.5, 6.1], False),
        ([0.0] * 6, [1.0] * 6, True),
        ([1.0, 2.0], [1.0, 2.0], True),  # equal models
        ([], [], True),
        ([1.0], [], True),
        ([math.nan], [0.0], True),  # nothing is known against the order
    ],
)
def test_what_samples_rank(a, b, expected):
    assert can_rank(a, b) is can_rank(b, a) is expected
