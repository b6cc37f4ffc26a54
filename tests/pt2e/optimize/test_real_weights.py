"""The gain of `optimize` on trained weights: the cases of the benchmark, each in one or two formats."""

from dataclasses import replace

import pytest

from tests.benchmarks.accuracy.models import MODELS
from tests.benchmarks.accuracy.packages import NotInstalledError

#: model, format, baseline, and the largest allowed share of its loss; the slow ones are goals
SHARES = [
    ("digits-cnn", "W4", "over even", 0.65),
    ("digits-mlp", "W4", "over even", 0.15),
    pytest.param("minilm", "W4", "over floor", 0.58, marks=pytest.mark.slow),
    pytest.param("smollm2", "W4", "over floor", 0.21, marks=pytest.mark.slow),
    pytest.param("smollm2", "W4A4", "over even", 0.36, marks=pytest.mark.slow),
    pytest.param("crepe-tiny", "W4", "over even", 0.3, marks=pytest.mark.slow),
    pytest.param("crepe-tiny", "W4A8", "over even", 0.3, marks=pytest.mark.slow),
]


@pytest.mark.slow_cases("digits-cnn-W4-over even-0.65")
@pytest.mark.parametrize(("model", "name", "baseline", "share"), SHARES)
def test_gptq_leaves_a_share_of_the_loss_of_rounding_to_nearest(
    model: str, name: str, baseline: str, share: float
) -> None:
    try:
        case = replace(MODELS[model](), formats=(name,))
    except NotInstalledError as error:
        pytest.skip(str(error))
    rounded = {row.get("rounding"): row for row in case.rows(("balanced",))}
    assert float(str(rounded["balanced"][baseline])) <= share
