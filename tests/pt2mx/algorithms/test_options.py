import math

import pytest

from pt2mx import MXError
from pt2mx.algorithms import GPTQ, LearnedRounding, Rotation, ScaleSearch, Smoothing
from pt2mx.algorithms.options import ALGORITHMS, PRESETS, chosen_algorithms, folded_rotation, plain_algorithms


def test_algorithms_come_in_the_order_in_which_they_are_applied():
    chosen = chosen_algorithms([GPTQ(), Rotation(), Smoothing(0.4)])
    assert chosen == (Smoothing(0.4), Rotation(), GPTQ())
    assert chosen_algorithms({"gptq": None, "smoothing": {"strength": 0.4}, "rotation": {}}) == chosen
    assert chosen_algorithms(GPTQ()) == (GPTQ(),)
    assert [type(one) for one in PRESETS["best"]] == list(ALGORITHMS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_by_name(name):
    assert chosen_algorithms(name) == PRESETS[name]
    assert plain_algorithms(PRESETS[name]) == name


def test_plain_algorithms_mean_the_same():
    chosen = (Rotation(size=64), ScaleSearch(by_inputs=True), LearnedRounding(steps=3))
    assert chosen_algorithms(plain_algorithms(chosen)) == chosen
    folded = (Rotation(online=False), GPTQ())
    assert (
        chosen_algorithms(plain_algorithms(folded))
        == folded
        == chosen_algorithms({"rotation": {"online": False}, "gptq": None})
    )
    assert folded_rotation(folded) == folded[0] and folded_rotation(chosen) is None


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("balancd", "unknown preset 'balancd': did you mean 'balanced'"),
        ({"gptk": None}, "unknown algorithm 'gptk': did you mean 'gptq'"),
        ({3: None}, "unknown algorithm 3"),
        ({"gptq": 5}, "algorithm gptq: its options must be a mapping, not 5"),
        (
            {"gptq": {"steps": 5}},
            "algorithm gptq: unknown option 'steps': allowed: damping, damping_of_few, act_order, correction",
        ),
        ((GPTQ(), GPTQ(damping=0.1)), "at least one algorithm, and each once"),
        ((), "at least one algorithm"),
        (GPTQ, "a tuple of Smoothing, Rotation"),
        (("gptq",), "a tuple of Smoothing, Rotation"),
        (7, r"mapping from smoothing, rotation, .* not \[7\]"),
    ],
)
def test_bad_choices(choice, message):
    with pytest.raises(MXError, match=message):
        chosen_algorithms(choice)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPTQ(damping=-1), r"GPTQ\(damping=-1\): damping must be a number from 0"),
        (lambda: GPTQ(damping=math.nan), "damping must be"),
        (lambda: GPTQ(damping="0.1"), "damping must be"),
        (lambda: GPTQ(act_order=1), "act_order must be True or False"),
        (lambda: Smoothing(strength=1.5), "strength must be a number from 0 to 1"),
        (lambda: Smoothing(strength=True), "strength must be"),
        (lambda: Rotation(size=24), "size must be a power of two"),
        (lambda: Rotation(online=0), "online must be True or False"),
        (lambda: Rotation(attention=True, online=False), "weights hold no rotation of queries and keys"),
        (lambda: Rotation(size=2), "size must be a number from 4 to 1024"),
        (lambda: LearnedRounding(steps=0), "steps must be a number from 1"),
    ],
)
def test_options_out_of_range(make, message):
    with pytest.raises(MXError, match=message):
        make()
