"""`pt2mx slice`: its files in a separate process, and the errors of its command line."""

import json

import pytest
import torch

import pt2mx
from pt2mx import LanguageModel, MXQuantizer, packed_weights
from pt2mx.pt2e.cli.command import main
from tests.fresh_process import run_program
from tests.language_models import checkpoint

_NET = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10)).eval(), (torch.randn(8, 64),)
"""
_MAIN = "import sys; from pt2mx.pt2e.cli.command import main; assert main(sys.argv[1:]) == 0"
_RUN = """
import torch, pt2mx
x = torch.linspace(-1, 1, 512).reshape(8, 64)
with torch.no_grad():
    torch.save(pt2mx.load_program("fp4.pt2").module()(x), "y.pt")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the 8-bit program of a model, and the folder "int8" of an 8-bit language model."""
    path = tmp_path_factory.mktemp("slice")
    (path / "net.py").write_text(_NET)
    quantize = ("quantize", "--recipe", "mxint8", "--model")
    assert main([*quantize, f"{path}/net.py:make", "--output", str(path / "int8.pt2")]) == 0
    name = checkpoint("llama", path / "llama", num_hidden_layers=1)
    assert main([*quantize, f"hf:{name}", "--output", str(path / "int8")]) == 0
    return path


def check(before, after, spec):
    for wide, narrow in zip(packed_weights(before), packed_weights(after), strict=True):
        scales, codes = pt2mx.quantize_mx(wide.dequantized(), spec)
        assert torch.equal(narrow.codes, codes) and torch.equal(narrow.scales, scales), wide.name


@pytest.mark.compiled
def test_a_slice_of_an_anchor_is_what_optimize_rounded(place, run):
    """Activations of the anchor are those of the recipe."""
    quantize = ("quantize", "--model", "net.py:make", "--recipe", "mxfp4", "--optimize", "balanced", "--output")
    assert run(*quantize, "alone.pt2")[0] == 0
    assert run(*quantize, "anchor.pt2", "--anchor", "mxint8")[0] == 0
    assert run("slice", "anchor.pt2", "--recipe", "mxfp4", "--output", "sliced.pt2")[0] == 0
    alone, anchor, sliced = (pt2mx.load_program(place / f"{name}.pt2") for name in ("alone", "anchor", "sliced"))
    assert {weight.spec.element.name for weight in packed_weights(anchor)} == {"int8"}
    x = torch.linspace(-1, 1, 512).reshape(8, 64)
    with torch.no_grad():
        assert torch.equal(sliced.module()(x), alone.module()(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model net.py:make --output o.pt2 --anchor mxint8", "--anchor keeps what algorithms round"),
        ("--model net.py:make --output o.pt2 --optimize fast --anchor mxfp99", "unknown MX element format 'mxfp99'"),
        ("--model net.py:make --output o.pt2 --optimize best --anchor mxint8", "learned rounding makes no slices"),
        ("--model net.py:make --output o.pt2 --optimize fast --anchor int3", "0.weight is int3, and the recipe's"),
        ("--model hf:llama --output o --optimize fast --anchor mxint8", "--anchor is for a program"),
        ("--model onnx:net.onnx --output o.onnx --anchor mxint8 --optimize fast", "is for PyTorch models"),
        ("--model onnx:net.onnx --output o.onnx --distill text.txt", "--distill is for PyTorch models"),
    ],
)
def test_bad_anchors(arguments, message, run, place):
    status, out, err = run("quantize", "--recipe", "mxfp4", *arguments.split())
    assert (status, out) == (2, "") and message in err.splitlines()[-1], err
    assert not any((place / name).exists() for name in ("o", "o.pt2", "o.onnx"))


@pytest.mark.compiled
def test_a_program_in_a_separate_process(place):
    arguments = ["slice", "int8.pt2", "--recipe", "mxfp4", "--output", "fp4.pt2", "--report", "fp4.json", "--json"]
    done = run_program(_MAIN, "-c", place, arguments=arguments)
    assert done.status == 0, done.err
    stages = [line.split("] ")[1] for line in done.err.splitlines() if "/3 " in line]
    assert stages == ["1/3 load", "2/3 slice", "3/3 save"]
    result = json.loads(done.out)
    assert result["output"] == "fp4.pt2" and result["bytes"] == (place / "fp4.pt2").stat().st_size
    assert result["report"] == json.loads((place / "fp4.json").read_text())
    anchor, sliced = (pt2mx.load_program(place / name) for name in ("int8.pt2", "fp4.pt2"))
    quantizer = MXQuantizer.from_recipe("mxfp4")
    check(anchor, sliced, pt2mx.MXSpec("mxfp4", scale_mode="even"))
    assert pt2mx.provenance_of(place / "fp4.pt2").recipe == quantizer.to_recipe()
    assert run_program(_RUN, "-c", place).status == 0
    with torch.no_grad():
        expected = pt2mx.slice_program(anchor, quantizer).module()(torch.linspace(-1, 1, 512).reshape(8, 64))
    assert torch.equal(torch.load(place / "y.pt"), expected)


@pytest.mark.slow
def test_a_language_model_in_a_separate_process(place):
    (place / "int8" / "preprocessor_config.json").write_text("{}")
    recipe = ["--recipe", "mxfp4_weight_only", "--output", "fp4", "--report", "fp4.html"]
    done = run_program(_MAIN, "-c", place, arguments=["slice", "int8", *recipe])
    (place / "int8" / "preprocessor_config.json").unlink()
    assert done.status == 0, done.err
    assert "9 of 10 operators quantized" in done.out
    assert (place / "fp4.html").read_text().startswith("<!DOCTYPE html>")
    names = {file.name for file in (place / "fp4").iterdir()}
    assert names == {file.name for file in (place / "int8").iterdir()} | {"preprocessor_config.json"}
    assert (place / "fp4" / "preprocessor_config.json").read_text() == "{}"
    (place / "fp4" / "preprocessor_config.json").unlink()
    report = json.loads((place / "fp4" / "report.json").read_text())
    specs = {one["spec"] for row in report["operators"] for one in row["operands"] if one["role"] == "weight"}
    assert {str(spec).partition("(")[0] for spec in specs} == {"mxfp4_e2m1{32}"}
    anchor, sliced = (LanguageModel.from_pretrained(place / name) for name in ("int8", "fp4"))
    check(anchor.program, sliced.program, pt2mx.MXSpec("mxfp4", scale_mode="even"))
    assert isinstance(sliced.generate(text="Hello", max_new_tokens=4, do_sample=False), str)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("net.py --recipe mxfp4 --output o.pt2", "'net.py' is no PT2 archive: give what `pt2mx quantize` or torch.ex"),
        ("none.pt2 --recipe mxfp4 --output o.pt2", "no file 'none.pt2': give what `pt2mx quantize` or torch.export."),
        ("int8.pt2 --recipe mxfp44 --output o.pt2", "no recipe 'mxfp44'"),
        ("int8.pt2 --recipe mxfp4 --output int8.pt2", "the program and --output are one file, 'int8.pt2'"),
        ("int8.pt2 --recipe mxfp4 --output o.onnx", "pt2mx export-onnx"),
        (
            "int8.pt2 --recipe mxfp4 --output o.pt2 --report o.txt",
            "cannot write 'o.txt': its name must end in .json",
        ),
        ("int8.pt2 --recipe nvfp4 --output o.pt2", "0.weight has blocks of 32, and the recipe blocks of 16"),
        ("int8 --recipe mxfp4 --output int8", "--output 'int8' is the folder of the checkpoint: give another one"),
        ("int8 --recipe mxfp4 --output o.pt2", "'int8' is a language model: give --output a folder, not 'o.pt2'"),
        ("int8 --recipe mxfp4 --output int8/fp4", "--output 'int8/fp4' lies in 'int8': give a folder outside of it"),
        (". --recipe mxfp4 --output ../o", "'.' holds no program.pt2: give the folder that `pt2mx quantize` wrote"),
    ],
)
def test_bad_input(arguments, message, run, place):
    before = {file: file.stat().st_mtime for file in place.rglob("*")}
    status, out, err = run("slice", *arguments.split())
    assert (status, out) == (2, "") and message in err and err.splitlines()[-1].startswith("pt2mx: error: ")
    assert {file: file.stat().st_mtime for file in place.rglob("*")} == before
