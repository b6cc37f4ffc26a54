"""The spellings of accumulators."""

import re

import pytest

import pt2mx
from pt2mx.spec import ROW


@pytest.mark.parametrize(
    ("text", "kind", "numbers", "group", "promotion"),
    [
        ("bfloat16", "bfloat16", (), 32, ROW),
        ("float16{16}", "float16", (), 16, ROW),
        ("float32{1}", "float32", (), 1, ROW),
        ("fixed(8, 16)", "fixed", (8, 16), 32, ROW),
        ("Fixed(0,1){32, 256}", "fixed", (0, 1), 32, 256),
        ("hopper", "hopper", (13,), 32, 128),
        ("hopper(14){32,row}", "hopper", (14,), 32, ROW),
        ("hopper{48}", "hopper", (13,), 48, ROW),  # no multiple of 48 is 128
        ("bfloat16{row}", "bfloat16", (), ROW, ROW),
    ],
)
def test_spellings(text, kind, numbers, group, promotion):
    accumulator = pt2mx.Accumulator(kind, numbers, group, promotion)
    assert pt2mx.parse_accumulator(text) == accumulator
    assert pt2mx.parse_accumulator(str(accumulator)) == pt2mx.parse_accumulator(accumulator) == accumulator


@pytest.mark.parametrize("value", [None, "float32"])
def test_torchs_own_sums_have_no_accumulator(value):
    assert pt2mx.parse_accumulator(value) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("bfloat", "unknown accumulator 'bfloat': did you mean 'bfloat16'? allowed: float32, float32{32}, bf"),
        ("fixed", "accumulator 'fixed' with numbers (): it takes (integer bits, fraction bits)"),
        ("fixed(8)", "with numbers (8,): it takes (integer bits, fraction bits)"),
        ("fixed(0,0)", "integer bits + fraction bits = 0, and must be from 1 to 52"),
        ("fixed(40,13)", "integer bits + fraction bits = 53, and must be from 1 to 52"),
        ("hopper(24)", "fraction bits of accumulator 'hopper'=24 must be an integer from 0 to 23"),
        ("bfloat16(3)", "with numbers (3,): it takes no numbers"),
        ("float16{0}", "the group of an accumulator=0 must be an integer of at least 1"),
        ("float16{32,100}", "100 products until the sum is added in float32 must be a multiple of the group, 32"),
        ("float16{32,}", "unknown accumulator 'float16{32,}'"),
        ("", "unknown accumulator ''"),
        (16, "unknown accumulator 16"),
    ],
)
def test_others_are_refused(value, message):
    with pytest.raises(pt2mx.MXError, match=re.escape(message)):
        pt2mx.parse_accumulator(value)


def test_fields_are_checked():
    with pytest.raises(pt2mx.MXError, match="unknown accumulator 'int32'"):
        pt2mx.Accumulator("int32")
    with pytest.raises(pt2mx.MXError, match="it takes"):
        pt2mx.Accumulator("hopper", 13)
