import re

import pytest

from pt2mx import MXError
from pt2mx.pt2e.quantizer.yaml_text import read_yaml


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", None),
        ("a: 1\nb: [x, null, true]", {"a": 1, "b": ["x", None, True]}),
        (
            "a: &x {k: 1}\nb: *x\nc: {<<: *x, l: 2}\nd: {<<: *x, k: 3}",
            {"a": {"k": 1}, "b": {"k": 1}, "c": {"k": 1, "l": 2}, "d": {"k": 3}},
        ),
        ("\ufeffa: µ", {"a": "µ"}),
        ("{a: {k: 1}, b: {k: 1}}", {"a": {"k": 1}, "b": {"k": 1}}),
    ],
)
def test_text_that_is_yaml(text, data):
    assert read_yaml(text.encode(), "a.yaml") == data


NESTED = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{n}: &{n} [{', '.join([f'*{chr(ord(n) - 1)}'] * 9)}]\n" for n in "bcdefghi"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' is there twice, in lines 1 and 3: keep one of them"),
        ("x:\n  - k: {}\n    l: 1\n    k: 2", "the key 'k' is there twice, in lines 2 and 4"),
        ("{1: a, 0x1: b}", "the key 1 is there twice, in lines 1 and 1"),
        ("{null: a, ~: b}", "the key None is there twice"),
        ("a: &a [*a]", "the anchor in line 1 holds itself"),
        ("&a {k: {l: *a}}", "the anchor in line 1 holds itself"),
        (NESTED, "it has more than 10,000 values"),
        ("[" * 5000, "it is nested too deeply"),
        ("{a: " * 5000, "it is nested too deeply"),
        ("a: 2020-13-45", "month must be in 1..12"),
        ("a: !!int x", "invalid literal"),
        ("a: !!int ''", "string index out of range"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("{[1]: 2}", "found unhashable key"),
        ("a: *b", "found undefined alias"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("{", "expected"),
        ("a: \x04", "unacceptable character"),
        (b"\xc7a: 1", "unacceptable character"),
        (b"\xff\xfe\x00", "'utf-16-le' codec|unacceptable|truncated"),
    ],
)
def test_what_is_wrong_is_an_error_that_says_so(text, message):
    with pytest.raises(MXError, match=message) as error:
        read_yaml(text.encode() if isinstance(text, str) else text, "dir/a.yaml")
    said = str(error.value)
    assert "\n" not in said and not re.search(r"<(byte|unicode|file|std)", said)
    assert 'in "' not in said or 'in "dir/a.yaml", ' in said
