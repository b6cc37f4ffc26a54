"""Compare formats: their properties, and their errors on data."""

import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pt2mx import (
    FORMATS,
    MX_FORMATS,
    MXError,
    MXSpec,
    compare_mx_formats,
    mx_quantize,
    parse,
    print_mx_format_table,
    quantize_mx,
)
from pt2mx.analysis.measure import MXStorage, mx_statistics
from pt2mx.analysis.tables import text_table

PYCHOP_NAMES = {"mxfp8_e5m2", "mxfp8_e4m3", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"}


def test_the_formats_have_pychops_names():
    assert set(MX_FORMATS) >= PYCHOP_NAMES
    assert all(parse(name) == spec == MXSpec(name, 32) for name, spec in MX_FORMATS.items())
    assert [spec.element for spec in MX_FORMATS.values()] == list(FORMATS.values())


def test_format_table(capsys):
    print_mx_format_table()
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split() == (
        "format bits exponent mantissa bias emax max min normal min subnormal special block scale bits/value "
        "x fp16 x fp32"
    ).split(" ")
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert list(rows) == list(MX_FORMATS)
    e4m3 = ["8", "4", "3", "7", "8", "448", "2^-6", "2^-9", "NaN", "32", "E8M0", "8.25", "1.94", "3.88"]
    assert rows["mxfp8_e4m3"] == e4m3
    assert rows["mxfp8_e5m2"][8:10] == ["Inf,", "NaN"]
    fp4 = ["4", "2", "1", "1", "2", "6", "2^0", "2^-1", "-", "32", "E8M0", "4.25", "3.76", "7.53"]
    assert rows["mxfp4_e2m1"] == fp4
    assert rows["mxint8"][:8] == ["8", "-", "6", "-", "0", "1.98438", "-", "2^-6"]
    stream = io.StringIO()
    print_mx_format_table(file=stream)
    assert stream.getvalue() == printed and capsys.readouterr().out == ""


def test_text_table():
    rows = [("name", "x", "note"), ("a", "1.5", ""), ("long name", "10", "b")]
    assert text_table(rows) == "name       x    note\na          1.5\nlong name  10   b"
    assert text_table(rows, left=1) == "name         x  note\na          1.5\nlong name   10     b"


def test_statistics_of_a_known_array():
    x = np.array([[7.0, 1.0, 0.1, -0.0], [3.0, 0.0, 0.0, 0.0]], np.float16)  # 7 saturates at 6, 0.1 flushes
    s = mx_statistics(x, "mxfp4", block_size=4)
    assert (s.format, s.exp_bits, s.sig_bits, s.block_size) == ("mxfp4_e2m1{4}", 2, 1, 4)
    assert (s.original_shape, s.num_blocks, s.total_elements, s.dtype) == ((2, 4), 2, 8, "float16")
    assert s.bits_per_element == 6.0 and s.compression_ratio == s.compression_ratio_fp16 == 16 / 6
    assert s.compression_ratio_fp32 == 32 / 6
    tenth = float(np.float16(0.1))
    assert s.max_abs_error == 1.0 and s.mean_abs_error == pytest.approx((1 + tenth) / 8)
    assert s.mean_squared_error == pytest.approx((1 + tenth**2) / 8)
    assert s.sqnr == pytest.approx(10 * math.log10((49 + 1 + 9 + tenth**2) / (1 + tenth**2)))
    assert s.saturated == s.flushed == 1 / 8
    assert s.scale_exponents == {-1: 1, 0: 1} and (s.scale_exponent_min, s.scale_exponent_max) == (-1, 0)
    assert s.nan_blocks == 0
    assert json.loads(json.dumps(s.to_dict()))["num_blocks"] == 2


@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_statistics_are_those_of_mx_quantize(name, axis):
    x = torch.randn(50, 70, requires_grad=True)
    s = mx_statistics(x, name, axis=axis, scale_mode="ceil")
    error = (mx_quantize(x, name, axis=axis, scale_mode="ceil").double() - x.double()).detach()
    assert s.max_abs_error == error.abs().max() and s.mean_abs_error == pytest.approx(error.abs().mean().item())
    assert s.mean_squared_error == pytest.approx(error.square().mean().item())
    blocks = {0: 2 * 70, 1: 50 * 3, -1: 50 * 3, None: -(-3500 // 32)}[axis]
    assert s.num_blocks == sum(s.scale_exponents.values()) == blocks and s.original_shape == (50, 70)
    assert s.saturated == 0
    assert s.bits_per_element == FORMATS[name.removeprefix("mx")].bits + 8 * blocks / 3500


def test_statistics_agree_over_the_libraries():
    x = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    assert mx_statistics(x) == mx_statistics(torch.from_numpy(x)) == mx_statistics(jnp.asarray(x))
    assert mx_statistics(jnp.asarray(x, jnp.bfloat16)).dtype == "bfloat16"
    assert mx_statistics(np.float32(3), "mxfp4").original_shape == ()


def test_blocks_that_are_not_finite_are_counted():
    x = torch.ones(2, 32)
    x[0, 0] = math.inf
    s = mx_statistics(x, "mxfp4")
    assert s.nan_blocks == 1 and s.scale_exponents == {-2: 1} and math.isnan(s.sqnr) and math.isnan(s.max_abs_error)
    s = mx_statistics(torch.full((32,), math.nan), "mxfp4")
    assert s.scale_exponents == {} and s.scale_exponent_min is None and s.scale_exponent_max is None


def test_storage_needs_no_values():
    x = torch.randn(6, 100)
    for spec in (MXSpec("int8", 16, 0), MXSpec("fp8_e5m2", 32, -1), MXSpec("int8_full", 7, 1)):
        scale, data = quantize_mx(x, spec)
        storage = MXStorage.of(x.shape, spec)
        assert storage.num_blocks == scale.numel() and storage.total_elements == 600
        assert storage.bits_per_element * 600 == 8 * (scale.numel() + data.numel())
    assert (storage.exp_bits, storage.sig_bits) == (0, 7)
    assert MXStorage.of((), MXSpec("fp4_e2m1")).num_blocks == 1
    empty = MXStorage.of((3, 0), MXSpec("fp4_e2m1"))
    assert empty.num_blocks == 0 and empty.bits_per_element == 4.25
    narrow = MXStorage.of((64,), MXSpec("fp4_e2m1", 16, scale_exp_bits=5, scale_sig_bits=1))
    assert narrow.bits_per_element == 4 + 6 / 16
    nv, rows = (MXStorage.of((20, 64), parse(name)) for name in ("nvfp4", "fp8_e4m3{8x32}(f32)"))
    assert nv.bits_per_element == 4 + 8 / 16 + 32 / 1280 and (nv.scale_exp_bits, nv.scale_sig_bits) == (4, 3)
    assert rows.num_blocks == 3 * 2 and rows.bits_per_element == 8 + 6 * 32 / 1280


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (torch.ones(3, 0), {}, "has no values"),
        (torch.ones(4), {"scale_exp_bits": 9}, "scale_exp_bits must be at most 8"),
        (np.ones(4), {}, "dtype float64"),
        ([1.0], {}, "a Python list"),
        (torch.ones(4), {"axis": 1}, "axis=1 is out of range"),
    ],
)
def test_statistics_that_cannot_be(data, arguments, message):
    with pytest.raises(MXError, match=message):
        mx_statistics(data, "mxfp4", **arguments)


def test_compare_prints_and_returns(capsys):
    x = torch.randn(64, 128).half()
    comparison = compare_mx_formats(x)
    printed = capsys.readouterr().out
    assert printed == f"{comparison}\n"
    lines = printed.splitlines()
    assert lines[0].split()[:4] == ["format", "bits", "SQNR", "dB"] and len(lines) == 1 + len(MX_FORMATS)
    rows = {row.format.partition("{")[0]: row for row in comparison.rows}
    assert list(rows) == list(MX_FORMATS)
    assert rows["mxint8"] == mx_statistics(x, "mxint8")
    assert rows["mxint8"].sqnr > rows["mxfp8_e4m3"].sqnr > rows["mxfp8_e5m2"].sqnr > rows["mxfp4_e2m1"].sqnr
    fp4, cells = rows["mxfp4_e2m1"], lines[1 + list(rows).index("mxfp4_e2m1")].split()
    assert cells[:3] == ["mxfp4_e2m1{32}", "4.25", f"{fp4.sqnr:.2f}"] and cells[-1] == "3.76x"
    assert float(cells[3]) == pytest.approx(fp4.max_abs_error, rel=1e-3)
    assert float(cells[4]) == pytest.approx(fp4.mean_abs_error, rel=1e-3)
    assert [float(cell) for cell in cells[5:7]] == pytest.approx([100 * fp4.saturated, 100 * fp4.flushed], abs=5e-3)
    assert repr(comparison).startswith(f"<MXComparison of {len(MX_FORMATS)} formats: mxfp8_e4m3{{32}}, ")
    assert comparison.to_dict()["mxint8{32}"] == rows["mxint8"].to_dict()


def test_compare_what_is_asked_for(capsys):
    x, stream = np.random.default_rng(0).standard_normal((10, 50), np.float32), io.StringIO()
    comparison = compare_mx_formats(x, ["int4", (2, 1), MXSpec("int8", 64)], block_size=16, axis=None, file=stream)
    assert [row.format for row in comparison.rows] == ["mxint4{16}", "mxfp4_e2m1{16}", "mxint8{16}"]
    assert all(row.num_blocks == 32 for row in comparison.rows)
    assert stream.getvalue() == f"{comparison}\n" and capsys.readouterr().out == ""
    assert [row.format for row in compare_mx_formats(x, ["mxfp4{8}", "mxfp4"]).rows] == [
        "mxfp4_e2m1{8}",
        "mxfp4_e2m1{32}",
    ]
    assert [row.format for row in compare_mx_formats(x, "mxfp4").rows] == ["mxfp4_e2m1{32}"]


def test_formats_that_a_model_stores_in_bytes_say_so():
    comparison = compare_mx_formats(torch.ones(64), ["int5", "mxfp4", "mxfp6"], file=io.StringIO())
    lines = str(comparison).splitlines()
    assert lines[4:] == ["mxint5{32}: a model stores 8.25 bits a value: codes of 5 bits take 8"]
    packed = quantize_mx(torch.ones(64), MXSpec("int5"))
    assert 8 * sum(part.nbytes for part in packed[:2]) / 64 == 8.25
