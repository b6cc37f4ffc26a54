import math

import pytest
import torch
from torch.nn import functional as F

from pt2mx.analysis.metrics import kl_divergence

INF, NAN = math.inf, math.nan


def logs(*logits):
    return torch.tensor(logits, dtype=torch.float64).log_softmax(-1)


def test_it_is_that_of_torch_where_all_is_possible():
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = (torch.randn(3, 4, 9, generator=generator).log_softmax(-1) for _ in range(2))
    got = kl_divergence(log_p, log_q)
    assert got.shape == (3, 4)
    assert torch.allclose(got, F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))


@pytest.mark.parametrize(
    ("log_p", "log_q", "divergence"),
    [
        (logs(0, 1, -INF), logs(0, 1, -INF), 0),
        (logs(0, 0, -INF), logs(0, 0, 0), math.log(1.5)),  # q gives a third to an outcome that p excludes
        (logs(0, 0, 0), logs(0, 0, -INF), INF),
        (logs(0, -INF), logs(-INF, 0), INF),
        (logs(0, -1e6), logs(0, -INF), 0),  # a probability below the smallest number is 0
        (logs(0, NAN), logs(0, 0), NAN),
        (logs(0, 0), logs(0, NAN), NAN),
        (logs(0, -INF), torch.tensor([0.0, NAN]), NAN),  # also for an outcome that p excludes
        (logs(-INF, -INF), logs(0, 0), NAN),  # no distribution
    ],
)
def test_of_what_is_ruled_out(log_p, log_q, divergence):
    assert kl_divergence(log_p, log_q).item() == pytest.approx(divergence, nan_ok=True)
