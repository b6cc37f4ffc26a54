"""The table of adapters, and the libraries that the tests' environment has: the faults for which they are known."""

import json

import pytest

from mx_conformance.__main__ import main
from mx_conformance.adapters import ADAPTERS, Adapter, score, select
from mx_conformance.errors import MXError
from mx_conformance.formats import FORMATS
from mx_conformance.libraries import Case, pt2mx_torch


@pytest.mark.compiled_except("pt2mx-torch")
@pytest.mark.parametrize("name", ["pt2mx-torch", "pt2mx-c++"])
def test_pt2mx_has_no_deviation(name):
    results = list(score(name, ["mxfp4"]))
    assert [result.scale_mode for result in results] == ["floor", "ceil", "rceil", "rceil_v2", "even", "doubled", "mse"]
    assert all(result.conforms and result.rounding == "even" for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["pt2mx-torch", "pt2mx-c++"])
def test_pt2mx_has_no_deviation_in_any_format(name, format):
    assert all(result.conforms for result in score(name, [format]))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "other", Adapter(pt2mx_torch, "other", "no_such_module"))
    assert select(["pt2mx-torch", "other"]) == (["pt2mx-torch"], {"other": "pip install other"})
    with pytest.raises(MXError, match="other is not installed: pip install other"):
        list(score("other"))
    with pytest.raises(MXError, match="unknown implementation 'pt2mx-trch': did you mean 'pt2mx-torch'"):
        list(score("pt2mx-trch"))


def test_what_an_adapter_raises_is_a_row(monkeypatch):
    def fails():
        yield Case("fp4_e2m1", lambda x: x[:1], scale_mode="floor", variant="short")
        raise ImportError("a library of another version")

    monkeypatch.setitem(ADAPTERS, "pt2mx-torch", Adapter(fails, "pt2mx", "pt2mx"))
    first, second = score("pt2mx-torch")
    assert first.name.endswith("(short)") and not first.conforms
    assert first.rows[0].example.startswith("raised MXError: quantize must return")
    assert second.rows[0].example == "raised ImportError: a library of another version"


def test_command(capsys, tmp_path):
    output = tmp_path / "scores.json"
    assert main(["--implementation", "ml_dtypes", "--format", "mxfp4", "--output", str(output)]) == 0
    assert capsys.readouterr().out.startswith("implementation")
    assert [result["conforms"] for result in json.loads(output.read_text())["results"]] == [True]
    for wrong in (["--implementation", "torcha"], ["--format", "mxfp5"], ["--output", "scores.txt"]):
        assert main(wrong) == 2
        assert wrong[1] in capsys.readouterr().err


def results(name, format):
    if name not in select([name])[0]:
        pytest.skip(f"{name} is not installed")
    return list(score(name, [format]))


def failing(result):
    return {row.corner: row.section for row in result.rows if row.deviations}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_installed_implementation_runs(name):
    if name not in select([name])[0]:
        pytest.skip(f"{name} is not installed")
    corners = {row.corner for result in score(name, ["mxfp8", "mxfp4"]) for row in result.rows}
    assert corners and not corners & {"import", "first call"}


def test_torchao():
    floor, rceil, ceil, even = results("torchao", "mxfp4")
    assert [r.scale_mode for r in (floor, rceil, ceil, even)] == ["floor", "rceil", "ceil", "even"]
    assert failing(floor)["small blocks"] == "5.4.1" and "scale rule" not in failing(floor)
    assert next(row for row in rceil.rows if row.corner == "scale rule").verdict == "other scale"  # of a rounded log2


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
