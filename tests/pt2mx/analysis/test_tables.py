import pytest

from pt2mx import MXError
from pt2mx.analysis.tables import ratio_text, text_table, worst_rows


def test_columns_are_aligned():
    rows = [("name", "bytes"), ("a", "1,000"), ("long name", "2")]
    assert text_table(rows, left=1) == "name       bytes\na          1,000\nlong name      2"


def test_the_worst_rows():
    assert [list(worst_rows("abc", worst)) for worst in (0, 2, 5, None)] == [[], ["a", "b"], list("abc"), list("abc")]
    for worst in (-1, 1.5, True, "two"):
        with pytest.raises(MXError, match=r"worst=.* must be a number of rows, or None for all"):
            worst_rows("abc", worst)


@pytest.mark.parametrize(
    ("ratio", "text"), [(2.04, "2.0x more"), (1.05, "1.1x more"), (1.04, "equal"), (0.96, "equal"), (0.25, "4.0x less")]
)
def test_ratios_in_words(ratio, text):
    assert ratio_text(ratio, "more", "less", "equal") == text
