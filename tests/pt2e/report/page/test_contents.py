import json
import math

import pytest

from pt2mx.pt2e.report.page.contents import contents, plain
from pt2mx.pt2e.report.page.context import PageContext
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
        for operand, found in zip(operator_report.operands, drawn["operands"], strict=True):
            assert (found["role"], found["spec"]) == (operand.role, operand.spec)
            if seen := operand.statistics:
                assert found["seen"]["noise"] == plain([seen.sqnr, seen.saturated, seen.flushed])
                pairs = found["seen"]["exponents"]
                assert dict(zip(pairs[::2], pairs[1::2], strict=True)) == seen.exponents
                assert [name for name, *_ in found["candidates"]] == list(operand.candidates)


def test_the_layer_that_saturates_is_an_outlier(shown):
    low = [(o["module"], p["role"]) for o in shown["operators"] for p in o["operands"] if p["below"]]
    assert ("layers.3", "weight") in low


def test_sensitivity_by_module_and_the_candidate_that_costs_most(full, shown):
    found = shown["sensitivity"]
    assert (found["metric"], found["worst"]) == ("noise", "mxfp4")
    assert set(found["modules"]) == {row.module for row in full.more["sensitivity"].rows}
    alone = {candidate: cost for candidate, _, cost, _, _ in found["modules"]["layers.0"]}
    assert alone["mxfp8"] < alone["mxfp4"]


def test_places_in_the_graphs(shown):
    for form, which in (("before", 0), ("after", 1)):
        nodes = [shown["graphs"][form][one["places"][which]] for one in shown["operators"]]
        assert [node[1] for node in nodes] == ["aten.linear"] * 9
        assert [node[4] for node in nodes] == [one["module"] for one in shown["operators"]]


def test_quality_of_the_comparison_where_none_is_given(full):
    for recipe, expected in (("mxfp8", [["cosine", 0.9987]]), ("mxint8", [])):
        context = PageContext(recipe=recipe, comparison=full.more["comparison"])
        assert contents(full.report, context)["quality"] == expected


def test_numbers_that_json_has_no_words_for():
    rows = [operator(f"m{i}", sqnr) for i, sqnr in enumerate((math.nan, math.inf, -math.inf, 1 / 3))]
    found = contents(report_of(*rows), PageContext(quality={"cosine": math.nan}))
    assert [o["operands"][0]["seen"]["noise"][0] for o in found["operators"]] == [
        "NaN",
        "Infinity",
        "-Infinity",
        0.333333,
    ]
    assert found["quality"] == [["cosine", "NaN"]]
    assert found["operators"][2]["operands"][0]["below"] == "Infinity"
    json.dumps(found, allow_nan=False)


def test_a_report_without_rows():
    found = contents(report_of(), PageContext())
    assert (found["operators"], found["formats"], found["graphs"]) == ([], [], {})
    assert (found["comparison"], found["sensitivity"], found["totals"]["bits"]) == (None, None, 0.0)
