import math

import pytest

from pt2mx.pt2e.report.page.outliers import outliers
from tests.reports import operator


def found(*sqnr):
    operands = operator("m", *sqnr).operands
    below = outliers(operands)
    return {i: below[id(operand)] for i, operand in enumerate(operands) if id(operand) in below}


def test_an_outlier_is_far_below_the_median_of_its_format():
    assert found(20.0, 21.0, 20.5, 12.0, 20.2, 20.1) == {3: pytest.approx(20.15 - 12.0)}


def test_what_is_within_the_spread_or_3_db_or_above_the_median_is_none():
    assert found(20.0, 26.0, 14.0, 23.0, 17.0, 12.0) == {}
    assert found(20.0, 20.0, 20.0, 20.0, 20.0, 17.5) == {}
    assert found(20.0, 20.0, 20.0, 20.0, 20.0, 40.0) == {}


def test_a_few_operands_have_no_outliers():
    assert found(20.0, 20.0, 20.0, 5.0) == {}


def test_ratios_that_are_not_finite():
    assert found(math.nan, math.inf, 20.0) == {}
    assert found(-math.inf, 20.0) == {0: math.inf}
    assert found(-math.inf) == {0: math.inf}


def test_formats_and_roles_are_compared_among_themselves():
    low = operator("m", *[10.0] * 6).operands
    high = [
        operand.__class__(**{**vars(operand), "role": "activation"}) for operand in operator("m", *[30.0] * 6).operands
    ]
    assert outliers([*low, *high]) == {}
