import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer
from pt2mx.pt2e.cli.arguments import WORST_OPERATORS
from pt2mx.pt2e.cli.result import Result, size_of, summary


def test_numbers_that_are_not_finite_are_null():
    data = {"a": math.inf, "b": [1.5, (math.nan, 2)], "c": {"d": -math.inf, "e": "text"}}
    actual = json.loads(Result("", data).to_json())
    assert actual == {"a": None, "b": [1.5, [None, 2]], "c": {"d": None, "e": "text"}}


@pytest.fixture(scope="module")
def report():
    """The report of twelve layers; the recipe skips the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).eval()
    quantizer = MXQuantizer.from_recipe("mxfp4").set_module_name("11", None)
    prepared = pt2mx.prepare_pt2e(torch.export.export(model, (torch.randn(4, 64),)).module(), quantizer)
    with torch.no_grad():
        prepared(torch.randn(4, 64))
    return pt2mx.quantization_report(pt2mx.convert_pt2e(prepared))


def sqnr(operator):
    return min(operand.statistics.sqnr for operand in operator.operands if operand.statistics)


def test_the_worst_ten_stand_first(report):
    heading, _, *rows, left, last = summary(report).splitlines()
    assert heading == "the 10 operators with the lowest SQNR of 12 (--full prints all):"
    order = sorted((o for o in report.operators if o.quantized), key=sqnr)
    assert [row.split()[0] for row in rows] == [operator.module for operator in order[:WORST_OPERATORS]]
    assert left.startswith("not quantized: 1 x ") and last == report.summary


def test_full_is_the_whole_table(report):
    assert summary(report, full=True) == report.to_table()
    few = replace(report, operators=report.operators[:WORST_OPERATORS])
    assert summary(few) == few.to_table()


def test_without_a_finite_sqnr_the_largest_stand_first(report):
    def exact(statistics):
        return statistics and replace(statistics, sqnr=math.inf)  # as of weights that optimize rounded

    for change in (lambda statistics: None, exact):
        operators = tuple(
            replace(one, operands=tuple(replace(o, statistics=change(o.statistics)) for o in one.operands))
            for one in report.operators
        )
        shown = summary(replace(report, operators=operators))
        assert shown.startswith("the 10 operators with the most bytes of 12 (--full prints all):\n")


def test_bytes_of_files_and_folders(tmp_path):
    for name, size in (("a", 3), ("b", 4)):
        (tmp_path / name).write_bytes(bytes(size))
    assert (size_of(tmp_path), size_of(tmp_path / "b")) == (7, 4)
