import pytest

from pt2mx import MXError
from pt2mx.pt2e.packages.nesting import leaves_by_name

NAMES = {"x": "d_x", "parts": ["d_parts_0", {"k": "d_parts_1_k", "times": "d_parts_1_times"}]}


def test_keys_count_and_not_their_order():
    want = {"d_x": 1, "d_parts_0": 2, "d_parts_1_k": 3, "d_parts_1_times": 4}
    for given in (
        {"x": 1, "parts": [2, {"k": 3, "times": 4}]},
        {"parts": (2, {"times": 4, "k": 3}), "x": 1},
    ):
        assert leaves_by_name(given, NAMES, "d") == want
    assert leaves_by_name(5, "n", "n") == {"n": 5}


def test_a_dict_may_lack_what_is_optional():
    given = {"x": 1, "parts": [2, {"k": 3}]}
    assert leaves_by_name(given, NAMES, "d", {"d_parts_1_times"}) == {"d_x": 1, "d_parts_0": 2, "d_parts_1_k": 3}
    with pytest.raises(MXError, match=r"d\['parts'\]\[1\] .* a dict of \['k', 'times'\], not a dict of \['k'\]"):
        leaves_by_name(given, NAMES, "d", {"d_x"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": 1}, r"d must be nested as in the example: a dict of \['x', 'parts'\], not a dict of \['x'\]"),
        ({"x": 1, "part": []}, r"d must be .*, not a dict of \['x', 'part'\]"),
        ([1, [2, {}]], "d must be .*, not a list of 2"),
        ({"x": 1, "parts": [2]}, r"d\['parts'\] must be nested as in the example: a list of 2, not a list of 1"),
        ({"x": 1, "parts": {"0": 2}}, r"d\['parts'\] must be .*, not a dict of \['0'\]"),
        ({"x": 1, "parts": 7}, r"d\['parts'\] must be .*, not int"),
    ],
)
def test_other_nestings(given, message):
    with pytest.raises(MXError, match=message):
        leaves_by_name(given, NAMES, "d")
