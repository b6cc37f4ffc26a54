import math

import pytest
import torch

from pt2mx import MXError
from pt2mx.analysis.agreement import check_diff

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
INF = torch.tensor([1.0, math.inf, -math.inf])


@pytest.mark.parametrize(
    ("y1", "y2", "options"),
    [
        (X, X.clone(), {}),
        (X, X.half(), {}),
        (None, None, {}),
        (X, X + 0.5, {"tol": 0.2}),  # 0.2 * (1 + 2.74)
        (X, X + torch.tensor([[0, 0], [0, 9]]), {"ntol": 1}),
        (INF, INF.clone(), {"handle_infs": True}),
        ((X, {"b": [X, 3]}), (X, {"b": [X, 3]}), {}),
        (torch.empty(0), torch.empty(0), {"tol": 1}),
    ],
)
def test_results_that_agree(y1, y2, options):
    assert check_diff(y1, y2, **options) is None


@pytest.mark.parametrize(
    ("y1", "y2", "options", "message"),
    [
        (
            X,
            X + torch.tensor([[0, 1], [0, 9]]),
            {},
            r"2 of 4 values differ by more than 0, the first at \(0, 1\): 2.0 and 3.0",
        ),
        (X, X + torch.tensor([[0, 1], [0, 9]]), {"ntol": 1}, "the largest difference is 9"),
        (X, X + 0.5, {"tol": 0.1}, "4 of 4 values differ by more than 0.373"),
        (X, X[0], {}, r"shapes differ: \(2, 2\) and \(2,\)"),
        (X, None, {}, "they differ|different structures"),
        (INF, INF.clone(), {}, r"2 of 3 values.*the first at \(1,\): inf and inf"),
        (INF, -INF, {"handle_infs": True, "ntol": 3}, "3 of 3 values"),
        (INF / INF, INF / INF, {"handle_infs": True}, "nan and nan"),
        ((X, X), (X, X + 1), {}, "of result 1, 4 of 4"),
        ((X, 3), (X, 4), {}, "of result 1, 3 and 4: they differ"),
        ((X,), [X], {}, "different structures"),
    ],
)
def test_results_that_differ(y1, y2, options, message):
    with pytest.raises(MXError, match=message):
        check_diff(y1, y2, **options)
