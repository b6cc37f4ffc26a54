import json
import math

from pt2mx.pt2e.cli.result import Result


def test_numbers_that_are_not_finite_are_null():
    data = {"a": math.inf, "b": [1.5, (math.nan, 2)], "c": {"d": -math.inf, "e": "text"}}
    found = json.loads(Result("", data).to_json())
    assert found == {"a": None, "b": [1.5, [None, 2]], "c": {"d": None, "e": "text"}}
