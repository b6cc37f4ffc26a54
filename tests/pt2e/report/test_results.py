import json
import math

import pytest
from scipy import stats

from pt2mx import MXError
from pt2mx.pt2e.report.results import RecipeComparison, RecipeRow, Sensitivity, SensitivityRow


def test_result(tmp_path):
    rows = [SensitivityRow(name, "mxfp4", "both", alone, math.nan, estimate) for name, alone, estimate in (
        ("a", 3.0, 2.0), ("b", 2.0, 3.0), ("c", 1.0, 0.5))]  # fmt: skip
    actual = Sensitivity("kl", tuple(rows), {"mxfp4": 7.0})
    assert math.isclose(actual.agreement("mxfp4"), 0.5, abs_tol=1e-6)
    assert math.isnan(actual.agreement("mxfp4", "weights")) and actual.of("mxfp4", "weights") == {}
    with pytest.raises(MXError, match="candidate='mxfp5' was not measured: did you mean 'mxfp4'"):
        actual.agreement("mxfp5")
    with pytest.raises(MXError, match="operands='weight' is unknown: did you mean 'weights'"):
        actual.of("mxfp4", "weight")
    with pytest.raises(MXError, match="worst='all' must be a number of rows, or None for all"):
        actual.to_table("all")
    assert json.loads(actual.to_json(tmp_path / "s.json"))["rows"][0]["module"] == "a"
    assert json.loads((tmp_path / "s.json").read_text())["whole"] == {"mxfp4": 7.0}
    _, row, whole = actual.to_table(1).splitlines()
    assert row.split() == ["a", "mxfp4", "both", "3", "2"] and whole == "mxfp4, everything: 7"


def test_agreement_of_equal_values_is_spearmans():
    pairs = ((1.0, 1.0), (1.0, 3.0), (1.0, 2.0), (4.0, 4.0), (5.0, 4.0))
    rows = [
        SensitivityRow(str(n), "mxfp4", "both", alone, math.nan, estimate) for n, (alone, estimate) in enumerate(pairs)
    ]
    got = Sensitivity("kl", tuple(rows), {}).agreement("mxfp4")
    assert math.isclose(got, stats.spearmanr(*zip(*pairs, strict=True)).statistic, abs_tol=1e-6)


ROWS = [RecipeRow("float", 400, 32.0, 1.0), RecipeRow("failed", note="it broke"), RecipeRow("eight", 100, 8.0, 0.9)]
ROWS += [RecipeRow("four", 50, 4.0, 0.7, 1.25), RecipeRow("worse", 50, 4.0, 0.6), RecipeRow("wasteful", 200, 16.0, 0.9)]


@pytest.mark.parametrize("larger_is_better", [True, False])
def test_the_front_is_pareto_optimal(larger_is_better):
    sign = 1 if larger_is_better else -1
    rows = [RecipeRow(row.name, row.bytes, row.bits, sign * row.quality) for row in ROWS]
    actual = RecipeComparison.of("quality", larger_is_better, rows)
    assert [row.name for row in actual.rows] == ["four", "worse", "eight", "wasteful", "float", "failed"]
    assert [row.name for row in actual.front()] == ["four", "eight", "float"]
    for row in actual.rows[:-1]:  # by definition
        beaten = [
            o for o in rows
            if o.bytes <= row.bytes and sign * o.quality >= sign * row.quality
            and (o.bytes, o.quality) != (row.bytes, row.quality)
        ]  # fmt: skip
        assert row.on_front is not any(beaten)


def test_equals_are_one_on_the_front():
    actual = RecipeComparison.of("q", True, [RecipeRow("a", 1, 1.0, 0.5), RecipeRow("b", 1, 1.0, 0.5)])
    assert [row.name for row in actual.front()] == ["a"]


def test_table_and_json(tmp_path):
    actual = RecipeComparison.of("cosine", True, ROWS)
    lines = str(actual).splitlines()
    assert lines[0].split() == ["recipe", "bytes", "bits", "cosine", "ms"]
    assert lines[1].split() == ["*", "four", "50", "4.00", "0.7", "1.25"]
    assert lines[6].split() == ["failed", "it", "broke"]
    content = json.loads(actual.to_json(tmp_path / "r.json"))
    assert content == json.loads((tmp_path / "r.json").read_text()) and content["metric"] == "cosine"
    assert content["rows"][0] == {
        "name": "four", "bytes": 50, "bits": 4.0, "quality": 0.7, "milliseconds": 1.25, "on_front": True, "note": "",
        "error": None, "tied": "",
    }  # fmt: skip
    assert content["rows"][-1]["quality"] is None and content["advice"] == actual.advice() == lines[-1]
    endless = RecipeComparison.of("SQNR", True, [RecipeRow("float", 1, 32.0, math.inf)])
    assert json.loads(endless.to_json())["rows"][0]["quality"] == "inf"
    with pytest.raises(MXError, match=r"cannot write '.*nowhere/r.json'"):
        actual.to_json(tmp_path / "nowhere" / "r.json")


def test_samples_too_few_to_rank():
    one = RecipeRow("one", 50, 4.0, 1 - 3.06e-5, samples=(3.06e-5,))
    other = RecipeRow("other", 50, 4.0, 1 - 3.16e-5, samples=(3.16e-5,))
    large = RecipeRow("large", 90, 7.0, 1 - 3e-6, error=2e-7, samples=(3e-6,))
    actual = RecipeComparison.of("cosine", True, [other, one, large])
    assert [(row.name, row.on_front, row.tied) for row in actual.rows] == [
        ("one", True, ""), ("other", False, "one"), ("large", True, ""),
    ]  # fmt: skip
    lines = str(actual).splitlines()
    assert lines[0].split() == ["recipe", "bytes", "bits", "cosine", "\u00b1"]
    assert lines[1].split() == ["*", "one", "50", "4.00", "0.9999694"]
    assert lines[2].split()[:4] == ["other", "50", "4.00", "0.9999684"]
    assert lines[2].endswith("too few samples to rank it against one")
    assert lines[3].split() == ["*", "large", "90", "7.00", "0.99999700", "2e-07"]
