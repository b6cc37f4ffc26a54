import math

import pytest

from pt2mx.pt2e.report.advice import advice, quality_text
from pt2mx.pt2e.report.results import RecipeComparison, RecipeRow

FLOAT = RecipeRow("float", 400, 32.0, 1.0)
FOUR, EIGHT = RecipeRow("four", 50, 4.0, 0.97), RecipeRow("eight", 100, 8.0, 0.995)


def of(*rows, metric="cosine", larger_is_better=True):
    return advice(RecipeComparison.of(metric, larger_is_better, rows))


def test_the_smallest_that_is_good_enough():
    assert of(FLOAT, FOUR, EIGHT) == (
        "Recommended: eight, the smallest recipe with a cosine of at least 0.9900 (0.99500), 4.0x smaller than float."
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (380, "3.8x smaller than float"),
        (105, "1.1x smaller than float"),
        (104, "about as large as float"),
        (96, "about as large as float"),
        (50, "2.0x larger than float"),
    ],
)
def test_the_size_in_words(size, text):
    better = RecipeRow("better", 100, 8.0, 0.999)
    assert of(RecipeRow("float", size, 32.0, 0.998), better).endswith(f" (0.99900), {text}.")


def test_the_interval_counts():
    wide = RecipeRow("wide", 80, 7.0, 0.992, error=0.004, samples=(0.008,) * 6)
    assert "Recommended: eight" in of(FLOAT, wide, EIGHT)
    narrow = RecipeRow("narrow", 80, 7.0, 0.992, error=0.001, samples=(0.008,) * 6)
    assert "Recommended: narrow" in of(FLOAT, narrow, EIGHT) and "(0.99200 ± 0.001)" in of(FLOAT, narrow, EIGHT)


def test_what_few_samples_do_not_show():
    rows = [RecipeRow(name, 50, 4.0, 1 - d, samples=(d,)) for name, d in (("a", 3.06e-5), ("b", 3.16e-5))]
    actual = of(FLOAT, *rows)
    assert actual.startswith("Recommended: a, ") and "(0.9999694)" in actual
    assert actual.endswith(
        "There are too few samples to rank it against b. Measure on more than 1 sample: 5 or more show the error."
    )


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((FLOAT,), "Nothing to recommend: no recipe works."),
        ((FLOAT, RecipeRow("failed", note="it broke")), "Nothing to recommend: no recipe works."),
        (
            (FLOAT, FOUR),
            "No recipe has a cosine of at least 0.9900: four is the closest, with 0.9700. Optimize its weights, or "
            "keep its costliest modules in float.",
        ),
        (
            (FLOAT, RecipeRow("wide", 80, 7.0, 0.992, error=0.004, samples=(0.008,) * 6)),
            "No recipe has a cosine of at least 0.9900: wide is the closest, with 0.99200 ± 0.004. Optimize its "
            "weights, or keep its costliest modules in float.",
        ),
        (
            (FLOAT, RecipeRow("large", 500, 40.0, 0.995)),
            "Nothing to recommend: the float model is smaller and better.",
        ),
        ((FLOAT, RecipeRow("infinite", 50, 4.0, -math.inf)), "Nothing to recommend: no recipe works."),
    ],
)
def test_nothing_to_recommend(rows, text):
    assert of(*rows) == text


def test_other_metrics():
    rows = RecipeRow("float", 400, 32.0, 0.0), RecipeRow("four", 50, 4.0, 0.3), RecipeRow("eight", 100, 8.0, 0.01)
    assert "Recommended: eight, the smallest recipe with a divergence of at most 0.05 nats (0.01), 4.0x" in of(
        *rows, metric="divergence, nats", larger_is_better=False
    )
    assert (
        of(*rows, metric="mine", larger_is_better=False)
        == "Choose one of the marked recipes by the mine that you need."
    )
    loss = RecipeRow("float", 400, 32.0, 2.0), RecipeRow("four", 50, 4.0, 2.1), RecipeRow("eight", 100, 8.0, 2.01)
    assert "Recommended: eight, the smallest recipe with a loss of at most 2.02 (2.01)" in of(
        *loss, metric="loss", larger_is_better=False
    )


def test_digits_of_a_quality():
    assert quality_text(0.99) == "0.9900" and quality_text(1.0) == "1" and quality_text(math.inf) == "inf"
    assert quality_text(1 - 3.06e-5) != quality_text(1 - 3.16e-5)
