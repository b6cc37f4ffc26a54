import json
import math

import pytest

from pt2mx import MXError
from pt2mx.pt2e.report.report import QuantizationReport
from tests.reports import HOSTILE, operator, report_of


def test_a_report_comes_back(tmp_path):
    report = report_of(operator("a", 20.5, 3.0), *(operator(name, 1.0, reason=name) for name in HOSTILE))
    report.to_json(tmp_path / "report.json")
    assert QuantizationReport.from_json(tmp_path / "report.json") == report


def test_ratios_that_were_not_finite_are_nan(tmp_path):
    report_of(operator("a", math.inf)).to_json(tmp_path / "report.json")
    (found,) = QuantizationReport.from_json(tmp_path / "report.json").operators
    assert math.isnan(found.operands[0].statistics.sqnr)
    assert found.operands[0].statistics.exponents == {-3: 1, 2: 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot read '.*report\.json' as a report in JSON: .*No such file"),
        ("{", "cannot read .* as a report in JSON: Expecting property name"),
        ("[]", "is no report that QuantizationReport.to_json wrote: TypeError"),
        ("{}", "is no report that QuantizationReport.to_json wrote: KeyError: 'operators'"),
        ('{"operators": [{"operands": 5}]}', "is no report that QuantizationReport.to_json wrote: TypeError"),
        ('{"operators": []}', "is no report that QuantizationReport.to_json wrote: KeyError: 'values'"),
        ('{"operators": [], "values": "1"}', "is no report that QuantizationReport.to_json wrote: TypeError: 'str'"),
        ("[" * 100_000, "cannot read .* as a report in JSON: maximum recursion depth"),
    ],
)
def test_what_is_no_report(text, message, tmp_path):
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(MXError, match=message):
        QuantizationReport.from_json(file)


def test_what_is_no_path():
    with pytest.raises(MXError, match=r"cannot read '5' as a report in JSON: .*not '?int"):
        QuantizationReport.from_json(5)


def test_fields_that_no_operator_has(tmp_path):
    file = tmp_path / "report.json"
    held = json.loads(report_of(operator("a", 1.0)).to_json())
    held["operators"][0]["more"] = 1
    file.write_text(json.dumps(held))
    with pytest.raises(MXError, match=r"TypeError: .*unexpected keyword argument 'more'"):
        QuantizationReport.from_json(file)
