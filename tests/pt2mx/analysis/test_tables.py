import pytest

from pt2mx import MXError
from pt2mx.analysis.tables import text_table, worst_rows


def test_columns_are_aligned():
    rows = [("name", "bytes"), ("a", "1,000"), ("long name", "2")]
    assert text_table(rows, left=1) == "name       bytes\na          1,000\nlong name      2"


def test_the_worst_rows():
    assert [list(worst_rows("abc", worst)) for worst in (0, 2, 5, None)] == [[], ["a", "b"], list("abc"), list("abc")]
    for worst in (-1, 1.5, True, "two"):
        with pytest.raises(MXError, match=r"worst=.* must be a number of rows, or None for all"):
            worst_rows("abc", worst)
