import json
import subprocess
import sys

import pytest
import torch

from pt2mx.pt2e.command import main

FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
    return model, (torch.randn(4, 64),), ({0: torch.export.Dim("batch")},)

def broken():
    1 / 0

def unfit():
    return nn.Linear(4, 4), (torch.randn(2, 5),)
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FACTORY)
    (tmp_path / "none.yaml").write_text("global: {}")
    (tmp_path / "short").mkdir()
    torch.save(torch.randn(4, 63), tmp_path / "short" / "batch.pt")
    return "net.py:make"


def test_quantize_writes_program_and_report_and_prints_the_table(factory, tmp_path, capsys):
    (tmp_path / "batches").mkdir()
    for i in range(3):
        torch.save((torch.randn(8, 64),), tmp_path / "batches" / f"{i}.pt")
    arguments = ["quantize", "--model", factory, "--recipe", "mxfp6", "--calibration", "batches"]
    assert main([*arguments, "--output", "q.pt2", "--report", "q.json"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("module") and lines[1].split()[:3] == ["0", "aten.linear", "mxfp6_e2m3{32}"]
    assert lines[3].startswith("2 of 2 operators quantized")
    assert lines[-2].startswith("output against the float model: SQNR ") and "cosine 0.99" in lines[-2]
    size, read = (tmp_path / "q.pt2").stat().st_size, json.loads((tmp_path / "q.json").read_text())
    assert lines[-1] == f"q.pt2: {size / 1e6:.1f} MB, {read['effective_bits']:.2f} bits a value"
    assert err == "", "progress bars are off when stderr is no terminal"
    program = torch.export.load(tmp_path / "q.pt2").module()
    assert program(torch.randn(7, 64)).shape == (7, 16)
    assert read["operators"][0]["operands"][0]["statistics"]["values"] == 3 * 8 * 64


def test_compile_compares_with_eager(factory, capsys):
    torch._dynamo.reset()
    assert main(["quantize", "--model", factory, "--recipe", "mxfp4_weight_only", "--compile"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compiled against eager")]
    assert float(line.split("SQNR ")[1].split()[0]) > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "net.py:broken"], "could not load the model: ZeroDivisionError"),
        (["--model", "net.py:unfit"], "could not export the model: RuntimeError"),
        (["--recipe", "none.yaml"], "selects no operator of the model"),
        (["--calibration", "short"], "could not run a calibration batch"),
        (["--output", "."], "cannot write '.'"),
        (["--model", "minlm"], "unknown model 'minlm': did you mean 'minilm'"),
        (["--recipe", "mxfp44"], "no recipe 'mxfp44'"),
        (["--calibration", "nowhere"], "no calibration batches"),
        (["--output", "nowhere/q.pt2"], "cannot write 'nowhere/q.pt2': it must be a file in a folder that exists"),
        (["--report", "nowhere/q.json"], "cannot write 'nowhere/q.json'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(change, message, factory, capsys):
    assert main(["quantize", "--model", factory, "--recipe", "mxfp8", *change]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pt2mx: error: ") and message in err and err.count("\n") == 1


def test_formats_prints_the_table(capsys):
    assert main(["formats"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    element = ["mxfp8_e4m3", "8", "4", "3", "7", "8", "448", "2^-6", "2^-9", "NaN"]
    assert rows[1] == [*element, "32", "E8M0", "8.25", "1.94", "3.88"]
    assert rows[2][9:11] == ["Inf,", "NaN"] and rows[6][:4] == ["mxint8", "8", "-", "6"] and len(rows) == 7


def test_module_is_the_command(tmp_path):
    result = subprocess.run([sys.executable, "-m", "pt2mx", "formats"], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.startswith("format"), result.stderr
    assert result.stderr == "", "the imports of torchao say nothing to the user"
