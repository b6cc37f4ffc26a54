import itertools
from fractions import Fraction

import pytest
import torch

from mx_conformance.exact import floor_log2, grid
from pt2mx import ELEMENTS, FORMATS, ElementFormat, MXError, MXSpec, create_mx_spec, parse, parse_element
from pt2mx.modes import ROUNDINGS
from tests.oracle import NARROW, WIDE, modes_of


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
        ((0, 7), "int8"),
        ((0, 3), "int4"),
        ("mxint4", "int4"),
        ("INT2", "int2"),
        ("int8_full", "int8_full"),
        ("e3m3", "fp7_e3m3"),
        ("MXFP5[E2M2]", "fp5_e2m2"),
        ("fp8_e3m4", "fp8_e3m4"),
        ((1, 1), "fp3_e1m1"),
        ((7, 0), "fp8_e7m0"),
        ("fp8_e4m3_finite", "fp8_e4m3_finite"),
        ("mxfp8_e5m2_finite", "fp8_e5m2_finite"),
        ((5, 10), "fp16_e5m10"),
        ("e5m10", "fp16_e5m10"),
        ("MXFP16[E5M10]", "fp16_e5m10"),
        ("float12_e4m7", "fp12_e4m7"),
        ((1, 14), "fp16_e1m14"),
        ("mxint16", "int16"),
        (torch.int16, "int16"),
        ((0, 11), "int12"),
        ("int9_full", "int9_full"),
    ],
)
def test_element_spellings(spelling, expected):
    assert parse_element(spelling) is ELEMENTS[expected]
    assert parse(spelling) == MXSpec(expected)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("MXFP8[E4M3]{32}", MXSpec("fp8_e4m3", 32)),
        ("mxfp4{16}", MXSpec("fp4_e2m1", 16)),
        ("MXINT8{64,-2}", MXSpec("int8", 64, -2)),
        ("BFP[8|8]{64}(SN)", MXSpec("int8", 64)),
        ("BFP[8|8]{64,0}", MXSpec("int8", 64, 0)),
        ("BFP[8|8]{64}(_N)", MXSpec("int8_full", 64)),
        ("BFP[4|8]{16}(SS)", MXSpec("int4", 16, rounding="stochastic")),
        ("BFP[4|8]{16}(SU)", MXSpec("int4", 16, rounding="up")),
        ("BFP[6|5]{128}(_D)", MXSpec("int6_full", 128, rounding="down", scale_exp_bits=5)),
        ("mxfp4{32}(half_away)", MXSpec("fp4_e2m1", rounding="half_away")),
        ("mxfp4{32}(mse,stochastic)", MXSpec("fp4_e2m1", scale_mode="mse", rounding="stochastic")),
        ("mxfp4(even,even,e5m2)", MXSpec("fp4_e2m1", scale_mode="even", scale_exp_bits=5, scale_sig_bits=2)),
        ("bfp[8|8]", MXSpec("int8", 32)),
        ("BFP[16|8]{32}", MXSpec("int16", 32)),
        ("BFP[12|8]{16}(_S)", MXSpec("int12_full", 16, rounding="stochastic")),
        ("BFP16", MXSpec("int8", 64)),
        ("BFP12", MXSpec("int4", 128)),
        ("BFP16_32", MXSpec("int8", 32)),
        ("BFP16A_64", MXSpec("int8_full", 64)),
        ("bfp14_16", MXSpec("int6", 16)),
        ("BFP12{16,1}(up)", MXSpec("int4", 16, 1, rounding="up")),
        ("BFP24_64", MXSpec("int16", 64)),
        ("mxfp6_e3m2{32}(rceil)", MXSpec("fp6_e3m2", 32, scale_mode="rceil")),
        ("mxfp4{32}(rceil,even)", MXSpec("fp4_e2m1", 32, scale_mode="rceil")),
        (MXSpec("int8", 8), MXSpec("int8", 8)),
    ],
)
def test_spec_spellings(spelling, expected):
    assert parse(spelling) == expected
    assert parse(spelling, block_size=7, axis=1) == expected.replace(block_size=7, axis=1)


@pytest.mark.parametrize("name", ELEMENTS)
def test_text_of_a_spec_parses_back(name):
    for scale_mode, rounding, scale in itertools.product(modes_of(name), ROUNDINGS, ((8, 0), (5, 0), (8, 3))):
        spec = MXSpec(name, 48, -1, scale_mode, rounding, *scale)
        assert parse(str(spec)) == spec


def test_every_split_and_width_has_an_element():
    floats = {(f.exponent_bits, f.mantissa_bits) for f in ELEMENTS.values() if not f.is_int}
    assert floats == {(e, m) for e in range(1, 8) for m in range(16) if e + m <= 15}
    assert {f.bits for f in ELEMENTS.values() if f.is_int} == set(range(2, 17))
    assert set(NARROW) == {f.name for f in ELEMENTS.values() if f.bits <= 8} and set(WIDE) <= set(ELEMENTS) - set(
        NARROW
    )
    for f in ELEMENTS.values():
        largest = Fraction(f.max_normal)
        assert (floor_log2(largest), f.max_code < 2 ** (f.bits - 1)) == (f.emax, True)
        if f.is_wide and f.name not in WIDE:
            continue
        values = grid(f)
        assert (values[-1], values.index(largest)) == (largest, f.max_code)
        assert f.has_inf or f.has_nan or len(values) == 2 ** (f.bits - 1)  # every code a number


def test_finite_only_floats_of_the_splits_with_special_values():
    for name, largest in (("fp8_e4m3", 480.0), ("fp8_e5m2", 114688.0)):
        finite = ELEMENTS[f"{name}_finite"]
        assert (finite.max_normal, finite.has_inf, finite.has_nan) == (largest, False, False)
        assert parse_element((finite.exponent_bits, finite.mantissa_bits)).name == name


def test_custom_specs():
    assert create_mx_spec(4, 3) == MXSpec("fp8_e4m3") and create_mx_spec(0, 7, 64) == MXSpec("int8", 64)
    spec = create_mx_spec(3, 1, 16, scale_exp_bits=5, scale_sig_bits=3, rounding="up")
    assert (spec.element.name, spec.block_size, spec.rounding, spec.effective_bits) == ("fp5_e3m1", 16, "up", 5.5)
    assert create_mx_spec(5, 10).element is ELEMENTS["fp16_e5m10"] and create_mx_spec(0, 15).effective_bits == 16.25
    with pytest.raises(MXError, match=r"\(8, 7\).*1 to 7 exponent bits and at most 16 bits"):
        create_mx_spec(8, 7)


@pytest.mark.parametrize(
    ("spelling", "names"),
    [
        ("mxpf4", "'mxfp4'"),
        ("fp8_e4m4", "'fp8_e4m3'"),
        ("MXFP4[E2M2]{32}", "fp4_e2m1"),
        ("mxfp4{0}", "block_size=0"),
        ("mxfp4{32}(flor)", "'floor'"),
        ("BFP[8|8]{64}(SX)", "'X'"),
        ("BFP[17|8]{64}", "int16"),
        ("BFP32_1", "int2 to int16"),
        ("BFP16_64{32}", "unknown MX format"),
        ("fp16_e8m7", "at most 16 bits"),
        ("BFP[8|12]{64}", "scale_exp_bits=12 must be an integer from 1 to 11"),
        ("fp8_e4m2", "fp8_e4m3"),
        ("int1", "int8"),
        ((5, 11), "at most 16 bits"),
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
        ({"scale_exp_bits": 0}, "scale_exp_bits=0 must be an integer from 1 to 11"),
        ({"scale_sig_bits": 24}, "scale_sig_bits=24 must be an integer from 0 to 23"),
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
