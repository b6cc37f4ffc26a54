import json
import math

import numpy as np
import pytest
import torch

from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.page.contents import PageContext, contents, outliers, plain
from pt2mx.pt2e.quantizer import recipe
from tests.reports import full_report, operator, report_of


@pytest.fixture(scope="module")
def full():
    return full_report()


@pytest.fixture(scope="module")
def shown(full):
    return contents(full.report, PageContext(**full.more))


def test_numbers_are_those_of_the_report(full, shown):
    report = full.report
    assert shown["totals"] == {
        "before": report.bytes_before,
        "after": report.bytes_after,
        "bits": float(f"{report.effective_bits:.6g}"),
        "weightBits": 4.25,
        "quantized": 8,
    }
    assert shown["quality"] == [["cosine", 0.9712], ["SQNR in dB", 12.5]]
    weights = 8 * 64 * 34
    assert shown["formats"] == [["mxfp4_e2m1{32}", weights], [None, report.bytes_after - weights]]
    for operator_report, drawn in zip(report.operators, shown["operators"], strict=True):
        assert (drawn["module"], drawn["notes"]) == (operator_report.module, operator_report.notes)
        for operand, actual in zip(operator_report.operands, drawn["operands"], strict=True):
            assert (actual["role"], actual["spec"]) == (operand.role, operand.spec)
            if seen := operand.statistics:
                assert actual["seen"]["noise"] == plain([seen.sqnr, seen.saturated, seen.flushed])
                pairs = actual["seen"]["exponents"]
                assert dict(zip(pairs[::2], pairs[1::2], strict=True)) == seen.exponents
                assert [name for name, *_ in actual["candidates"]] == list(operand.candidates)


def test_the_layer_that_saturates_is_an_outlier(shown):
    low = [(o["module"], p["role"]) for o in shown["operators"] for p in o["operands"] if p["below"]]
    assert ("layers.3", "weight") in low


def test_sensitivity_by_module_and_the_candidate_that_costs_most(full, shown):
    actual = shown["sensitivity"]
    assert (actual["metric"], actual["worst"]) == ("noise", "mxfp4")
    assert set(actual["modules"]) == {row.module for row in full.more["sensitivity"].rows}
    alone = {candidate: cost for candidate, _, cost, _, _ in actual["modules"]["layers.0"]}
    assert alone["mxfp8"] < alone["mxfp4"]


def test_positions_in_the_graphs(shown):
    for form, which in (("before", 0), ("after", 1)):
        nodes = [shown["graphs"][form][one["places"][which]] for one in shown["operators"]]
        assert [node[1] for node in nodes] == ["aten.linear"] * 9
        assert [node[4] for node in nodes] == [one["module"] for one in shown["operators"]]


def test_quality_of_the_comparison_where_none_is_given(full):
    for name, expected in (("mxfp8", [["cosine", 0.9987]]), ("mxint8", [])):
        context = PageContext(recipe=name, comparison=full.more["comparison"])
        assert contents(full.report, context)["quality"] == expected


def test_the_speed_of_the_comparison(shown, full):
    speed = shown["comparison"]["speed"]
    assert speed["method"] == full.more["comparison"].speed.method and speed["processor"] == "a processor"
    assert [(row["name"], row["note"]) for row in speed["rows"]] == [
        ("bfloat16", ""),
        ("mxfp4", "1.5x slower than bfloat16"),
        ("float32", "it does not compile"),
    ]
    assert [row["milliseconds"] for row in speed["rows"]][1:] == [{"median": 3.0, "low": 3.0, "high": 3.0}, None]


def test_numbers_that_json_has_no_words_for():
    rows = [operator(f"m{i}", sqnr) for i, sqnr in enumerate((math.nan, math.inf, -math.inf, 1 / 3))]
    actual = contents(report_of(*rows), PageContext(quality={"cosine": math.nan}))
    assert [o["operands"][0]["seen"]["noise"][0] for o in actual["operators"]] == [
        "NaN",
        "Infinity",
        "-Infinity",
        0.333333,
    ]
    assert actual["quality"] == [["cosine", "NaN"]]
    assert actual["operators"][2]["operands"][0]["below"] == "Infinity"
    json.dumps(actual, allow_nan=False)


def test_a_report_without_rows():
    actual = contents(report_of(), PageContext())
    assert (actual["operators"], actual["formats"], actual["graphs"]) == ([], [], {})
    assert (actual["comparison"], actual["sensitivity"], actual["totals"]["bits"]) == (None, None, 0.0)


def below_median(*sqnr):
    operands = operator("m", *sqnr).operands
    below = outliers(operands)
    return {i: below[id(operand)] for i, operand in enumerate(operands) if id(operand) in below}


def test_an_outlier_is_far_below_the_median_of_its_format():
    assert below_median(20.0, 21.0, 20.5, 12.0, 20.2, 20.1) == {3: pytest.approx(20.15 - 12.0)}


def test_operands_within_the_spread_or_3_db_or_above_the_median_are_no_outliers():
    assert below_median(20.0, 26.0, 14.0, 23.0, 17.0, 12.0) == {}
    assert below_median(20.0, 20.0, 20.0, 20.0, 20.0, 17.5) == {}
    assert below_median(20.0, 20.0, 20.0, 20.0, 20.0, 40.0) == {}


def test_a_few_operands_have_no_outliers():
    assert below_median(20.0, 20.0, 20.0, 5.0) == {}


def test_ratios_that_are_not_finite():
    assert below_median(math.nan, math.inf, 20.0) == {}
    assert below_median(-math.inf, 20.0) == {0: math.inf}
    assert below_median(-math.inf) == {0: math.inf}


def test_formats_and_roles_are_compared_among_themselves():
    low = operator("m", *[10.0] * 6).operands
    high = [
        operand.__class__(**{**vars(operand), "role": "activation"}) for operand in operator("m", *[30.0] * 6).operands
    ]
    assert outliers([*low, *high]) == {}


def test_the_recipe_to_copy(tmp_path):
    assert PageContext(recipe="mxfp4").recipe_text() == recipe.text("mxfp4")
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight="mxint8"))
    assert PageContext(recipe=quantizer).recipe_text() == "global:\n  weight: mxint8{32}\n"
    file = tmp_path / "own.yaml"
    quantizer.to_recipe(file)
    for path in (file, str(file)):
        context = PageContext(recipe=path)
        assert (context.recipe_name, context.recipe_text()) == (str(file), file.read_text())
    assert PageContext().recipe_text() == ""
    with pytest.raises(MXError, match="no recipe 'mxfp44'"):
        PageContext(recipe="mxfp44").recipe_text()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("model", 5, "str"),
        ("recipe", {}, "str or PathLike or MXQuantizer"),
        ("quality", 0.99, "Mapping"),
        ("comparison", [], "RecipeComparison or None"),
        ("sensitivity", "kl", "Sensitivity or None"),
    ],
)
def test_other_objects_are_refused(name, value, allowed):
    with pytest.raises(MXError, match=rf"{name} must be {allowed}, not of type {type(value).__name__}"):
        PageContext(**{name: value})


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5], dtype=torch.bfloat16)])
def test_quality_is_a_number_of_any_library(value):
    assert repr(PageContext(quality={"accuracy": value}).known_quality()) == "{'accuracy': 0.5}"


@pytest.mark.parametrize("value", ["high", None, 10**400, torch.ones(2)])
def test_quality_that_is_no_number_is_refused(value):
    with pytest.raises(MXError, match=r"quality\['accuracy'\] must be a number, not "):
        PageContext(quality={"accuracy": value}).known_quality()
