import pytest

from pt2mx import MXError
from pt2mx.pt2e.optimize.schedule import Schedule


@pytest.mark.parametrize(
    ("decay", "warmup", "rates"),
    [
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
        ("cosine", 0, [1, 0.8535534, 0.5, 0.1464466]),
        ("constant", 1, [0.5, 1, 1, 1]),
    ],
)
def test_rates(decay, warmup, rates):
    schedule = Schedule(lr=1.0, decay=decay, warmup=warmup)
    assert [schedule.rate(step, 4) for step in range(4)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decay", "cosin", "unknown decay 'cosin': did you mean 'cosine'"),
        ("warmup", -1, "warmup=-1 must be an integer of at least 0"),
        ("epochs", 2.5, "epochs=2.5 must be an integer of at least 1"),
        ("accumulate", 0, "accumulate=0 must be an integer of at least 1"),
        ("lr", float("nan"), "lr=nan must be a finite number above 0"),
        ("lr", "1e-3", "lr='1e-3' must be a finite number above 0"),
    ],
)
def test_bad_settings(name, value, message):
    with pytest.raises(MXError, match=message):
        Schedule(**{name: value})


def test_steps():
    assert Schedule(epochs=2, accumulate=2).steps(9, 2) == 5
    with pytest.raises(MXError, match="warmup=9 must be less than the number of steps, which is 9"):
        Schedule(warmup=9).steps(9, 1)
