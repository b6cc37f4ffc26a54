"""Adapters of the libraries that the tests' environment has: the faults for which they are known."""

import pytest

from pt2mx.conformance.adapters.table import ADAPTERS, missing, score


def results(name, format):
    if missing([name]):
        pytest.skip(f"{name} is not installed")
    return list(score(name, [format]))


def failing(result):
    return {row.corner: row.section for row in result.rows if row.deviations}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_installed_implementation_runs(name):
    if missing([name]):
        pytest.skip(f"{name} is not installed")
    corners = {row.corner for result in score(name, ["mxfp8", "mxfp4"]) for row in result.rows}
    assert corners and not corners & {"import", "first call"}


def test_torchao():
    floor, rceil, ceil, even = results("torchao", "mxfp4")
    assert [r.scale_mode for r in (floor, rceil, ceil, even)] == ["floor", "rceil", "ceil", "even"]
    assert failing(floor)["small blocks"] == "5.4.1" and "scale rule" not in failing(floor)
    assert failing(rceil)["scale rule"] == "6.3"  # exponents from a rounded log2


@pytest.mark.slow
def test_torchao_fp6_takes_a_byte_a_code():
    assert all("codes packed bytes" in result.choices for result in results("torchao", "fp6_e2m3"))


def test_compressed_tensors():
    (fp4,) = results("compressed-tensors", "mxfp4")
    assert fp4.scale_mode == "even" and failing(fp4) == {"large blocks": "5.4.1", "scale byte 255": "5.1"}


@pytest.mark.slow
def test_compressed_tensors_rounds_scales_of_fp8_as_those_of_fp4():
    (fp8,) = results("compressed-tensors", "mxfp8")
    assert fp8.scale_mode == "even_m1"


def test_gguf():
    (fp4,) = results("gguf", "mxfp4")
    assert (fp4.scale_mode, fp4.rounding) == ("floor", "half_toward_zero")
    assert "codes packed halves" in fp4.choices
    assert failing(fp4)["powers of two"] == "6.3" and failing(fp4)["scale byte 255"] == "5.1"


def test_transformers_decodes_gpt_oss():
    (fp4,) = results("transformers", "mxfp4")
    assert failing(fp4) == {"scale byte 255": "5.1"}


@pytest.mark.slow_cases("fp8_e5m2-choices1")
@pytest.mark.parametrize(
    ("format", "choices"),
    [("fp8_e4m3", ("overflow becomes NaN",)), ("fp8_e5m2", ("overflow becomes Inf",)), ("fp4_e2m1", ())],
)
def test_elements_of_ml_dtypes(format, choices):
    (result,) = results("ml_dtypes", format)
    assert result.conforms and result.choices == choices


def test_reference_evaluator_of_onnx():
    (result,) = results("onnx", "mxfp4")
    assert result.conforms and result.scale_mode == "-"
