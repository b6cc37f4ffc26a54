"""The table of scale formats, and the texts that name them."""

import copy
import itertools

import pytest
import torch

from pt2mx import (
    ELEMENTS,
    SCALE_FORMATS,
    ElementFormat,
    MXError,
    MXSpec,
    ScaleFormat,
    dequantize_mx,
    fake_quantize_mx,
    parse,
    parse_scale_format,
    quantize_mx,
)
from pt2mx.kernels.float_scales import code_of, codes_of, value_of
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS, SCALE_MODES, scale_modes
from pt2mx.spec import ROW
from tests.float_scale_oracle import quantize_block

FLOATS = [f for f in SCALE_FORMATS.values() if not f.is_power_of_two]


@pytest.mark.parametrize(
    ("name", "bits", "largest", "smallest", "dtype"),
    [
        ("e8m0", 8, 2.0**127, 2.0**-127, torch.uint8),
        ("e4m3", 8, 448.0, 2.0**-9, torch.uint8),
        ("e4m3_f32", 8, 448.0, 2.0**-9, torch.uint8),
        ("e4m3_f32_divisor", 8, 448.0, 2.0**-9, torch.uint8),
        ("e5m3", 8, 114688.0, 2.0**-17, torch.uint8),
        ("f32", 32, torch.finfo(torch.float32).max, 2.0**-126, torch.float32),
        ("bf16", 16, torch.finfo(torch.bfloat16).max, 2.0**-126, torch.bfloat16),
        ("f16", 16, 65504.0, 2.0**-24, torch.float16),
    ],
)
def test_table(name, bits, largest, smallest, dtype):
    f = SCALE_FORMATS[name]
    assert (f.bits, f.max_value, f.min_value, f.dtype) == (bits, largest, smallest, dtype)
    assert [f for f in SCALE_FORMATS.values() if f.is_power_of_two] == [SCALE_FORMATS["e8m0"]]


@pytest.mark.parametrize("f", [f for f in FLOATS if f.bits < 32], ids=str)
def test_codes_ascend_and_are_those_of_their_values(f):
    spec = MXSpec("fp4_e2m1", scale_format=f)
    codes = torch.arange(int(code_of(torch.tensor(f.max_value), spec)) + 1, dtype=torch.int32)
    values = value_of(codes, spec)
    assert ((values.diff() > 0).all() and values[-1] == f.max_value and f.nan == len(codes)) or f.nan > len(codes)
    assert torch.equal(code_of(values, spec), codes)
    assert value_of(torch.tensor([f.nan], dtype=torch.int32), spec).isnan().all()
    if f.grid == ELEMENTS["fp8_e4m3"]:
        assert torch.equal(values, codes.to(torch.uint8).view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("mxfp4", MXSpec("fp4_e2m1", 32)),
        ("fp8_e4m3{128x128}", MXSpec("fp8_e4m3", 128, block_rows=128)),
        ("nvfp4", MXSpec("fp4_e2m1", 16, scale_format="e4m3_f32")),
        ("NVFP4[E2M1]", MXSpec("fp4_e2m1", 16, scale_format="e4m3_f32")),
        ("nvfp4_e2m1{16,0}(four_six)", MXSpec("fp4_e2m1", 16, 0, "four_six", scale_format="e4m3_f32")),
        ("nvfp8_e4m3{16}(up)", MXSpec("fp8_e4m3", 16, rounding="up", scale_format="e4m3_f32")),
        ("nvfp4{16x16}", MXSpec("fp4_e2m1", 16, scale_format="e4m3_f32", block_rows=16)),
        ("fp4_e2m1{16}(e4m3)", MXSpec("fp4_e2m1", 16, scale_format="e4m3")),
        ("fp4_e2m1{16}(UE4M3)", MXSpec("fp4_e2m1", 16, scale_format="e4m3")),
        ("fp8_e4m3{128x128}(f32)", MXSpec("fp8_e4m3", 128, scale_format=torch.float32, block_rows=128)),
        ("fp8_e4m3{row}(f32)", MXSpec("fp8_e4m3", ROW, scale_format="f32")),
        ("int4{128}(bf16)", MXSpec("int4", 128, scale_format=torch.bfloat16)),
        ("int8(mse,half_away,float16)", MXSpec("int8", 32, -1, "mse", "half_away", scale_format="f16")),
        # behind `mx` these are widths of an exponent and a significand that is counted
        ("mxfp4{16}(e4m3)", MXSpec("fp4_e2m1", 16, scale_exp_bits=4, scale_sig_bits=3)),
        ("fp4{16}(e5m0)", MXSpec("fp4_e2m1", 16, scale_exp_bits=5)),
    ],
)
def test_texts(spelling, expected):
    assert parse(spelling) == expected
    assert parse(str(expected), axis=expected.axis) == expected


@pytest.mark.parametrize("f", SCALE_FORMATS.values(), ids=str)
def test_every_text_parses_back(f):
    for name, rounding, rows, block in itertools.product(
        ("fp4_e2m1", "int8_full", "fp8_e4m3_finite"), ROUNDINGS, (1, 128, ROW), (16, ROW)
    ):
        for mode in scale_modes(f, ELEMENTS[name]):
            spec = MXSpec(name, block, -1, mode, rounding, scale_format=f, block_rows=rows)
            assert parse(str(spec)) == spec == copy.deepcopy(spec)


def test_defaults_follow_the_scale_format():
    spec = parse("mxfp4")
    assert spec.replace(scale_format="e4m3").scale_mode == "nearest"
    assert spec.replace(scale_mode="mse").replace(scale_format="e4m3").scale_mode == "mse"
    assert parse("nvfp4").replace(scale_format="e8m0").scale_mode == "floor"
    assert (parse("nvfp4").effective_bits, parse("fp8_e4m3{128x128}(f32)").effective_bits) == (4.5, 8 + 32 / 128**2)
    assert not parse("nvfp4").has_e8m0_scale and parse("fp8{128x128}").has_e8m0_scale
    assert parse_scale_format(SCALE_FORMATS["f16"]) is parse_scale_format(torch.float16) is SCALE_FORMATS["f16"]


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("nvfp4(floor)", "unknown scale_mode 'floor' of e4m3_f32 scales: did you mean 'four_six'? allowed: nearest,"),
        ("mxfp4(nearest)", "unknown scale_mode 'nearest': allowed: floor"),
        ("mxfp8{128x128}(f32)", "the prefix 'mx' says e8m0 scales: leave it out for f32 scales"),
        ("nvfp4(e4m3)", "the prefix 'nv' says e4m3_f32 scales: leave it out for e4m3 scales"),
        ("fp8{0x128}", "block_rows=0 must be an integer of at least 1"),
        ("fp8{128x0}", "block_size=0 must be an integer of at least 1"),
        ("fp8{rowx128}", "unknown MX format 'fp8{rowx128}'"),
        ("fp4(f33)", "unknown mode or scale format 'f33': did you mean 'f32'? allowed: floor"),
        ("fp4(f33,f32)", "unknown scale_mode 'f33' of f32 scales"),
        ("nvfp5", "unknown element format in 'nvfp5': did you mean 'nvfp4'? allowed: nvfp4,"),
        ("nvfp9", "unknown element format in 'nvfp9'"),
        ("nvnvfp4", "unknown MX format 'nvnvfp4'"),
        ("nvmxfp4", "unknown MX format 'nvmxfp4'"),
    ],
)
def test_errors_of_texts(spelling, message):
    with pytest.raises(MXError) as error:
        parse(spelling)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale_format": "e4m4"}, "unknown scale format 'e4m4': did you mean 'e4m3'? allowed: e8m0, e4m3, e4m3_f32,"),
        ({"scale_format": None}, "unknown scale format None: "),
        ({"scale_format": torch.float64}, "unknown scale format torch.float64: "),
        ({"scale_format": "e4m3", "scale_mode": "rceil", "scale_exp_bits": 4}, "scale_exp_bits=4 and scale_sig_bits=0"),
        ({"scale_format": "e4m3", "scale_mode": "even"}, "unknown scale_mode 'even' of e4m3 scales"),
        ({"block_rows": True}, "block_rows=True must be an integer of at least 1"),
        ({"block_rows": 2.0}, "block_rows=2.0 must be an integer of at least 1"),
    ],
)
def test_errors_of_fields(fields, message):
    with pytest.raises(MXError) as error:
        MXSpec("fp4_e2m1", **fields)
    assert message in str(error.value)


def test_rows_need_a_dimension():
    for x, axis in ((torch.ones(32), 0), (torch.ones(4, 4, 4), 0)):
        with pytest.raises(MXError, match=r"blocks of 2 rows along axis=0 need a second dimension, .* or block_rows=1"):
            fake_quantize_mx(x, "mxfp4{2x32}", axis=axis)
    with pytest.raises(MXError, match="a tensor of rank 0 does not have"):
        parse("mxfp4{2x32}").row_axis(0)
    with pytest.raises(MXError, match=r"of one row only; quantize_mx, .* take other scale formats"):
        parse("mxfp8{128x128}").check_plain_scale()


def test_a_format_of_ones_own_by_the_recipe(monkeypatch):
    """The steps of CONTRIBUTING: a row of the table is all that specs, texts and the reference kernel need."""
    grid = ElementFormat("fp9_e4m4", 4, 4, 7, 8, 480.0, has_nan=True)
    row = ScaleFormat("e4m4", grid, torch.uint8, 0xFF)
    monkeypatch.setitem(SCALE_FORMATS, "e4m4", row)
    spec = parse("fp4_e2m1{4}(rceil,e4m4)", axis=1)
    assert (spec.scale_format, str(spec), row.min_value) == (row, "fp4_e2m1{4}(rceil,e4m4)", 2.0**-10)
    x = torch.randn(40, 4) * torch.logspace(-6, 6, 40).unsqueeze(1)
    x[3, 2] = torch.inf
    for mode in FLOAT_SCALE_MODES:
        spec = spec.replace(scale_mode=mode)
        scale, data = quantize_mx(x, spec)
        y = dequantize_mx(data, scale, spec)
        assert torch.equal(y.nan_to_num(7), fake_quantize_mx(x, spec).nan_to_num(7)) and y[3].isnan().all()
        for i, block in enumerate(x.tolist()):
            assert codes_of(scale)[i].item() == quantize_block(block, spec.element, row, mode)[0]


def test_families_of_scale_modes():
    assert scale_modes(SCALE_FORMATS["e8m0"]) == scale_modes(SCALE_FORMATS["e8m0"], ELEMENTS["fp4_e2m1"]) == SCALE_MODES
    assert [*scale_modes(SCALE_FORMATS["e8m0"], ELEMENTS["int8"])] == [
        "floor",
        "ceil",
        "rceil",
        "even",
        "doubled",
        "mse",
    ]
    assert all(scale_modes(f) is FLOAT_SCALE_MODES for f in FLOATS)


@pytest.mark.parametrize(
    ("text", "divides", "reciprocal", "searches", "widths", "significant", "without"),
    [
        ("mxfp4", False, False, False, (8, 0), 2, "mxfp4_e2m1{32}"),
        ("mxfp8(mse)", False, False, True, (8, 0), 4, "mxfp8_e4m3{32}(mse)"),
        ("mxint8(e5m2)", False, False, False, (5, 2), 7, "mxint8{32}(e5m2)"),
        ("nvfp4", False, False, False, (4, 3), 6, "fp4_e2m1{16}(e4m3)"),
        ("nvfp4(nearest_reciprocal)", False, True, False, (4, 3), 6, "fp4_e2m1{16}(nearest_reciprocal,e4m3)"),
        ("fp4{16}(mse,e4m3_f32_divisor)", True, False, True, (4, 3), 6, "fp4_e2m1{16}(mse,e4m3)"),
        ("nvfp4(four_six)", False, False, True, (4, 3), 6, "fp4_e2m1{16}(four_six,e4m3)"),
        ("fp8{128x128}(f32)", False, False, False, (8, 23), 28, "fp8_e4m3{128x128}(f32)"),
    ],
)
def test_questions_of_a_spec(text, divides, reciprocal, searches, widths, significant, without):
    spec = parse(text)
    assert (spec.divides_by_tensor_scale, spec.multiplies_by_reciprocal) == (divides, reciprocal)
    assert (spec.searches, spec.scale_widths, spec.significant_bits) == (searches, widths, significant)
    assert str(spec.without_tensor_scale()) == without and not spec.without_tensor_scale().has_tensor_scale


@pytest.mark.parametrize(("text", "blocks"), [("mxfp4{16}", "16"), ("fp8{128x64}(f32)", "128x64"), ("fp8{row}", "row")])
def test_the_size_of_a_block(text, blocks):
    assert parse(text).blocks == blocks


@pytest.mark.parametrize(
    ("text", "axis", "shape", "expected"),
    [
        ("mxfp4", -1, (3, 70), (3, 3)),
        ("mxfp4", 0, (70, 3), (3, 3)),
        ("fp8{128x64}(f32)", -1, (2, 300, 512), (2, 3, 8)),
        ("fp8{128x64}(f32)", -2, (2, 300, 512), (2, 5, 4)),
        ("fp8{row}(f32)", -1, (3, 70), (3, 1)),
        ("mxfp4", -1, (3, 0), (3, 0)),
    ],
)
def test_the_shape_of_scales(text, axis, shape, expected):
    spec = parse(text, axis=axis)
    assert spec.scale_shape(shape) == expected
    assert tuple(quantize_mx(torch.ones(shape), spec)[0].shape) == expected
