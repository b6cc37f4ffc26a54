import pytest
import torch

from pt2mx import FORMATS, ElementFormat, MXError, MXSpec, parse, parse_element
from tests.oracle import floor_log2, grid


@pytest.mark.parametrize(
    ("name", "bits", "emax", "largest", "smallest", "has_inf", "has_nan"),
    [  # OCP MX v1.0, section 5.3
        ("fp8_e4m3", 8, 8, 448.0, 2.0**-9, False, True),
        ("fp8_e5m2", 8, 15, 57344.0, 2.0**-16, True, True),
        ("fp6_e3m2", 6, 4, 28.0, 2.0**-4, False, False),
        ("fp6_e2m3", 6, 2, 7.5, 2.0**-3, False, False),
        ("fp4_e2m1", 4, 2, 6.0, 0.5, False, False),
        ("int8", 8, 0, 127 / 64, 1 / 64, False, False),
    ],
)
def test_table_is_that_of_the_specification(name, bits, emax, largest, smallest, has_inf, has_nan):
    f = FORMATS[name]
    assert (f.bits, f.emax, f.max_normal, f.has_inf, f.has_nan) == (bits, emax, largest, has_inf, has_nan)
    values = grid(f)
    assert (values[1], values[-1]) == (smallest, largest)
    assert floor_log2(values[-1]) == f.emax
    assert values.index(f.max_normal) == f.max_code


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("mxfp4", "fp4_e2m1"),
        ("mxfp4_e2m1", "fp4_e2m1"),
        ("fp4_e2m1", "fp4_e2m1"),
        ("float4_e2m1", "fp4_e2m1"),
        ("MXFP4[E2M1]", "fp4_e2m1"),
        ("e2m1", "fp4_e2m1"),
        ("torch.float4_e2m1fn_x2", "fp4_e2m1"),
        (torch.float4_e2m1fn_x2, "fp4_e2m1"),
        ((2, 1), "fp4_e2m1"),
        ("mxfp6", "fp6_e2m3"),
        ("mxfp6_e3m2", "fp6_e3m2"),
        ("float6_e2m3fn", "fp6_e2m3"),
        ((3, 2), "fp6_e3m2"),
        ((2, 3), "fp6_e2m3"),
        ("mxfp8", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        ("torch.float8_e4m3fn", "fp8_e4m3"),
        (torch.float8_e5m2, "fp8_e5m2"),
        ((4, 3), "fp8_e4m3"),
        ((5, 2), "fp8_e5m2"),
        ("mxint8", "int8"),
        ("int8", "int8"),
        (torch.int8, "int8"),
        (FORMATS["int8"], "int8"),
    ],
)
def test_element_spellings(spelling, expected):
    assert parse_element(spelling) is FORMATS[expected]
    assert parse(spelling) == MXSpec(expected)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("MXFP8[E4M3]{32}", MXSpec("fp8_e4m3", 32)),
        ("mxfp4{16}", MXSpec("fp4_e2m1", 16)),
        ("MXINT8{64,-2}", MXSpec("int8", 64, -2)),
        ("BFP[8|8]{64}(SN)", MXSpec("int8", 64)),
        ("BFP[8|8]{64,0}", MXSpec("int8", 64, 0)),
        ("bfp[8|8]", MXSpec("int8", 32)),
        ("mxfp6_e3m2{32}(rceil)", MXSpec("fp6_e3m2", 32, scale_mode="rceil")),
        ("mxfp4{32}(rceil,even)", MXSpec("fp4_e2m1", 32, scale_mode="rceil")),
        (MXSpec("int8", 8), MXSpec("int8", 8)),
    ],
)
def test_spec_spellings(spelling, expected):
    assert parse(spelling) == expected
    assert parse(spelling, block_size=7, axis=1) == expected.replace(block_size=7, axis=1)


@pytest.mark.parametrize("scale_mode", ["floor", "ceil", "rceil", "even"])
@pytest.mark.parametrize("name", FORMATS)
def test_text_of_a_spec_parses_back(name, scale_mode):
    spec = MXSpec(name, 48, scale_mode=scale_mode)
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("spelling", "names"),
    [
        ("mxpf4", "'mxfp4'"),
        ("fp8_e4m4", "'fp8_e4m3'"),
        ("MXFP4[E2M2]{32}", "fp4_e2m1"),
        ("mxfp4{0}", "block_size=0"),
        ("mxfp4{32}(flor)", "'floor'"),
        ("BFP[8|8]{64}(SX)", "'X'"),
        ("BFP[9|8]{64}", "int8"),
        ("", "allowed"),
        ("mxfp4{", "unknown MX format"),
        ("fp8[e4m3", "unknown MX element format"),
        ("mxfp8_e4m3]", "unknown MX element format"),
        ("mxfp4(rceil,ceil)", "unknown rounding 'ceil'"),
        ("mxfp4(rceil,even,even)", "at most a scale mode, a rounding"),
        ((9, 9), "allowed"),
        ((2, 1, 0), "allowed"),
        (torch.float32, "float32"),
        (None, "None"),
        (4, "allowed"),
    ],
)
def test_unknown_spellings_name_the_nearest(spelling, names):
    with pytest.raises(MXError, match=r".") as error:
        parse(spelling)
    assert names in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be an integer of at least 1"),
        ({"block_size": -32}, "block_size=-32"),
        ({"block_size": True}, "block_size=True"),
        ({"block_size": 2.5}, "block_size=2.5"),
        ({"axis": 1.0}, "axis=1.0 must be an integer"),
        ({"axis": None}, "axis=None"),
        ({"scale_mode": "flor"}, "did you mean 'floor'"),
        ({"scale_mode": ["floor"]}, "allowed: floor"),
        ({"rounding": "evn"}, "did you mean 'even'"),
    ],
)
def test_spec_refuses_other_values(fields, message):
    with pytest.raises(MXError) as error:
        MXSpec("fp4_e2m1", **fields)
    assert message in str(error.value)


def test_spec_is_frozen_hashable_and_counts_its_scale():
    spec = MXSpec("fp4_e2m1")
    assert {spec: 1}[MXSpec("mxfp4")] == 1
    assert spec.effective_bits == 4.25
    assert MXSpec("int8", 16).effective_bits == 8.5
    with pytest.raises(AttributeError):
        spec.block_size = 16
    assert isinstance(spec.element, ElementFormat)
