import importlib.util
import math

import pytest
import torch

from pt2mx import MXError, MXQuantizationConfig, quantization_report
from pt2mx.pt2e.report.dataframe import COLUMNS
from pt2mx.pt2e.report.report import QuantizationReport
from pt2mx.pt2e.report.rows import OperatorReport
from tests.flow import prepare
from tests.reports import operator, report_of


def test_rows_are_operands():
    pytest.importorskip("pandas")
    report = report_of(operator("a", 20.0, math.inf), operator("b", math.nan, reason="because"))
    table = QuantizationReport((*report.operators, OperatorReport("c", "", "MatMul", (), "skipped")), 1, 4, 4)
    actual = table.to_dataframe()
    assert list(actual.columns) == list(COLUMNS) and list(actual["module"]) == ["a", "a", "b", ""]
    assert list(actual["sqnr"])[:2] == [20.0, math.inf] and actual["sqnr"].isna().tolist() == [False, False, True, True]
    assert list(actual["bytes_after"]) == [34, 34, 34, 0] and actual["tensor_scale"].dtype == "float64"
    assert list(actual["notes"])[2:] == ["because", "skipped"] and list(actual["role"])[2:] == ["weight", ""]
    assert actual[actual.role == "weight"].groupby("format").bytes_after.sum().to_dict() == {"mxfp4_e2m1{32}": 102}


def test_without_pandas(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pandas" else find(name))
    with pytest.raises(MXError, match=r"^pandas is not installed: pip install pandas$"):
        report_of(operator("a", 20.0)).to_dataframe()


class Scores(torch.nn.Module):
    def forward(self, x):
        return x @ x.t()


def test_an_operator_outside_of_modules_has_its_node_and_line():
    report = quantization_report(prepare(Scores(), (torch.ones(4, 64),), MXQuantizationConfig(activation="mxfp8")))
    (actual,) = report.operators
    line = Scores.forward.__code__.co_firstlineno + 1
    assert (actual.module, actual.source) == ("", f"test_dataframe.py:{line}")
    assert actual.label == f"{actual.name} (test_dataframe.py:{line})" and actual.label in report.to_table()
