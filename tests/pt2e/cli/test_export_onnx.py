import onnx
import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import extras
from pt2mx.pt2e.cli import command
from tests.flow import convert
from tests.onnx_nodes import run

BATCH = ({0: torch.export.Dim("batch")},)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder of programs: one quantized, in float32 and in bfloat16, one float."""
    folder, x = tmp_path_factory.mktemp("programs"), torch.randn(4, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    for name, net, batch in (("net", model, x), ("narrow", nn.Linear(64, 8).eval().bfloat16(), x.bfloat16())):
        converted = convert(net, (batch,), "mxfp8", shapes=BATCH)
        pt2mx.save_program(torch.export.export(converted, (batch,), dynamic_shapes=BATCH), folder / f"{name}.pt2")
    torch.export.save(torch.export.export(model, (x,)), folder / "float.pt2")
    (folder / "language").mkdir()
    (folder / "language" / "program.pt2").touch()
    return folder


@pytest.fixture
def here(programs, tmp_path, monkeypatch):
    """In an empty folder, beside which the programs lie."""
    monkeypatch.chdir(tmp_path)
    return programs


def export(*arguments):
    return command.main(["export-onnx", *map(str, arguments)])


@pytest.mark.parametrize("target", ["pt2mx", "quark"])
def test_prints_size_and_agreement(target, here, capsys, tmp_path):
    assert export(here / "net.pt2", "--output", "net.onnx", "--opset", "21", "--target", target) == 0
    first, second = capsys.readouterr().out.splitlines()
    written = tmp_path / "net.onnx"
    assert first.startswith(f"net.onnx: {written.stat().st_size:,} bytes (the program: ") and "), 4 MX nodes; " in first
    assert second.startswith("onnxruntime against the program: SQNR ") and "cosine 1.000000, largest diff" in second
    x = torch.randn(7, 64)
    with torch.no_grad():
        torch.testing.assert_close(run(str(written), x)[0], pt2mx.load_program(here / "net.pt2").module()(x))
    assert [entry.version for entry in onnx.load(written).opset_import if not entry.domain] == [21]


def test_a_file_that_onnxruntime_does_not_run_is_written_all_the_same(here, capsys, tmp_path):
    assert export(here / "narrow.pt2", "--output", "net.onnx") == 0
    assert "onnxruntime against the program: not compared: [ONNXRuntimeError]" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


def test_complex_outputs_are_not_compared(here, capsys, tmp_path):
    class Complex(nn.Linear):
        def forward(self, x):
            return torch.view_as_complex(super().forward(x).unflatten(-1, (4, 2)))

    x = torch.randn(4, 64)
    torch.export.save(torch.export.export(convert(Complex(64, 8), (x,)), (x,)), tmp_path / "complex.pt2")
    assert export("complex.pt2", "--output", "net.onnx") == 0
    assert "onnxruntime against the program: not compared: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.pt2", "--output", "net.onnx"), "no file 'nowhere.pt2'"),
        (("{here}", "--output", "net.onnx"), "programs0' is a folder and no file: give what `pt2mx quantize`"),
        (
            ("{here}/language", "--output", "net.onnx"),
            "is a folder and no file: a language model, whose program writes",
        ),
        (("{here}/float.pt2", "--output", "net.onnx"), "expected a converted model, not one without quantized tensors"),
        (("{here}/net.pt2", "--output", "net.pt2"), "its name must end in .onnx"),
        (("{here}/net.pt2", "--output", "no/net.onnx"), "it must be a file in a folder that exists"),
        (("{here}/net.pt2", "--output", "net.onnx", "--opset", "17"), "opset=17 must be an integer from 18 to 25"),
        (("{here}/net.pt2", "--output", "net.onnx", "--target", "quork"), "unknown target 'quork': did you mean"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, here, capsys, tmp_path):
    assert export(*(argument.format(here=here) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_extra_that_is_missing(here, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    assert export(here / "net.pt2", "--output", "net.onnx") == 2
    assert "onnx is not installed: pip install 'pt2mx[onnx]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
