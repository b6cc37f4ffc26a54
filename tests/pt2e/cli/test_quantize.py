import json
import sys

import numpy as np
import pytest
import torch

import pt2mx
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.program.provenance import provenance_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, fault=None):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.fault = nn.Linear(64, 128), nn.Linear(128, 16), fault

    def forward(self, x):
        y = nn.functional.gelu(self.up(x))
        if self.fault == "type":
            y = y + "text"
        return self.down(y)

class Index(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x, rows, times: int = 1):
        return self.fc(x)[rows] * times

DYNAMIC = ({0: torch.export.Dim("batch")},)

def make():
    return Net(), (torch.randn(4, 64),), DYNAMIC

def broken():
    helper()

def helper():
    raise KeyError("first line\\nsecond line: what matters")

def wrong_type():
    return Net("type"), (torch.randn(4, 64),)

def unfit():
    return nn.Linear(4, 4), (torch.randn(2, 5),)

def index():
    dims = {0: torch.export.Dim("batch")}, {0: torch.export.Dim("rows")}, torch.export.Dim.DYNAMIC
    return Index(), (torch.randn(4, 64), torch.arange(3), 3), dims

def nan_weights():
    model = Net()
    model.down.weight.data[3, 7] = float("nan")
    model.down.bias.data[0] = float("inf")
    return model, (torch.randn(4, 64),), DYNAMIC

def nan_inside():
    model = Net()
    model.up.bias.data[0] = 3e38
    return nn.Sequential(model.up, Square(), model.down), (torch.randn(4, 64),), DYNAMIC

def nan_sample():
    return Net(), (torch.full((4, 64), float("nan")),), DYNAMIC

class Square(nn.Module):
    def forward(self, x):
        return x * x
"""
#: run in a separate process: limits the size of files once the program is saved
FULL_DISK = """
import resource, sys
import torch
from pt2mx.pt2e.cli.command import main

save = torch.export.save

def save_on_a_full_disk(*args, **kwargs):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    save(*args, **kwargs)

torch.export.save, sys.stderr = save_on_a_full_disk, sys.stdout
print(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FACTORY)
    return tmp_path


def quantize(*options, model="make", recipe="mxfp8"):
    defaults = {"--model": f"net.py:{model}", "--recipe": recipe}
    given = [word for name, value in defaults.items() if name not in options for word in (name, value)]
    return main(["quantize", *given, *options])


def batches(folder, **contents):
    """A folder of batches; returns its name."""
    (folder / "batches").mkdir()
    for name, content in contents.items():
        if isinstance(content, dict) and all(isinstance(v, np.ndarray) for v in content.values()):
            np.savez(folder / "batches" / f"{name}.npz", **content)
        else:
            torch.save(content, folder / "batches" / f"{name}.pt")
    return "batches"


def test_it_writes_program_and_report_and_prints_the_table(folder, capsys):
    calibration = batches(folder, **{f"b{i}": (torch.randn(8, 64),) for i in range(3)})
    options = ["--calibration", calibration, "--output", "q.pt2", "--report", "q.json"]
    assert quantize(*options, recipe="mxfp6") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("module") and lines[1].split()[:3] == ["up", "aten.linear", "mxfp6_e2m3{32}"]
    assert lines[3].startswith("2 of 2 operators quantized")
    assert lines[-2].startswith("output against the float model: SQNR ") and "cosine 0.99" in lines[-2]
    size, read = (folder / "q.pt2").stat().st_size, json.loads((folder / "q.json").read_text())
    assert lines[-1].startswith(f"q.pt2: {size / 1e6:.1f} MB, {read['effective_bits']:.2f} bits a value; load ")
    assert err == "", "progress bars are off when stderr is no terminal"
    program = torch.export.load(folder / "q.pt2").module()
    assert program(torch.randn(7, 64)).shape == (7, 16)
    assert read["operators"][0]["operands"][0]["statistics"]["values"] == 3 * 8 * 64
    assert provenance_of("q.pt2").recipe == MXQuantizer.from_recipe("mxfp6").to_recipe()


def test_nvfp4(folder, capsys):
    """Tensor scales of activations follow from the batches; the report and `inspect` show the format."""
    x = [torch.randn(8, 64) for _ in range(3)]
    calibration = batches(folder, **{f"b{i}": (x[i],) for i in range(3)})
    assert quantize("--calibration", calibration, "--report", "q.json", recipe="nvfp4") == 0
    assert "; 2 static tensor scales from calibration" in capsys.readouterr().out
    program = torch.export.load(folder / "out.pt2")
    scales = {name: value for name, value in program.state_dict.items() if name.endswith("tensor_scale")}
    amax = torch.stack([one.abs().max() for one in x]).max()
    assert len(scales) == 4 and scales["x_tensor_scale"] == pt2mx.tensor_scale_mx(amax, "nvfp4")
    read = json.loads((folder / "q.json").read_text())["operators"][0]["operands"]
    assert read[0]["tensor_scale"] == scales["x_tensor_scale"].item() and read[1]["tensor_scale"] is None
    assert quantize("--calibration", "none", recipe="nvfp4") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the tensor scale of x in nvfp4_e2m1{16} follows from calibration" in err
    assert quantize("--calibration", "none", recipe="nvfp4_weight_only") == 0
    assert "static" not in capsys.readouterr().out


@pytest.mark.compiled
def test_it_optimizes_as_the_recipe_or_the_option_says(folder, capsys):
    (folder / "r.yaml").write_text("global: {weight: mxfp4}\nalgorithms: {gptq: , rotation: }\n")
    calibration = ["--calibration", batches(folder, **{f"b{i}": (torch.randn(256, 64),) for i in range(2)})]
    said = {
        "": ["2 weights: 2 rounded by gptq; 0 smoothed, 2 rotated"],
        "--optimize none": [],
        "--optimize imatrix": ["2 weights: 1 rounded by scales, 1 rounded by nearest values; 0 smoothed, 0 rotated"],
        "--optimize fast": ["2 weights: 1 rounded by scales, 1 rounded by nearest values; 0 smoothed, 0 rotated"],
    }
    sqnr = {}
    for how, line in said.items():
        assert quantize(*calibration, *how.split(), recipe="r.yaml") == 0
        lines = capsys.readouterr().out.splitlines()
        sqnr[how] = float(next(x for x in lines if x.startswith("output")).split("SQNR ")[1].split()[0])
        assert [x for x in lines if " weights: " in x] == line
        program = torch.export.load(folder / "out.pt2").module()
        assert program(torch.randn(7, 64)).shape == (7, 16)
    assert sqnr["--optimize none"] <= sqnr["--optimize fast"] < sqnr[""]
    assert quantize("--calibration", "none", recipe="r.yaml") == 2
    assert "give --calibration a folder of batches" in capsys.readouterr().err
    (folder / "r.yaml").write_text("global: {weight: mxfp4}\nalgorithms: {rotation: , scale_search: }\n")
    assert quantize("--calibration", "none", recipe="r.yaml") == 0  # these algorithms look at no inputs
    assert "2 rotated" in capsys.readouterr().out


@pytest.mark.compiled
def test_compile_compares_with_eager(capsys, compiler):
    assert quantize("--compile", recipe="mxfp4_weight_only") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compiled against eager")]
    assert float(line.split("SQNR ")[1].split()[0]) > 100


@pytest.mark.parametrize("name", ["report.html", "report.HTM"])
def test_reports_as_html(name, folder):
    assert quantize("--report", name) == 0
    text = (folder / name).read_text()
    assert text.startswith("<!DOCTYPE html>") and "<h1>net.py:make</h1>" in text
    for part in ('"quality":[["cosine",', '"recipe":{"name":"mxfp8","text":"# For: ', '"graphs":{"before":[["'):
        assert part in text


def test_no_calibration(capsys):
    assert quantize("--calibration", "none") == 0
    out = capsys.readouterr().out
    assert "no SQNR of activations: it holds no statistics of a calibration" in out
    assert "output against the float model: SQNR " in out and "nan" not in out


BAD_OPTIONS = [
    (
        ["--model", "net.py:broken"],
        "could not load the model: KeyError: 'first line\\nsecond line: what matters' (net.py:",
    ),
    (["--model", "net.py:wrong_type"], "could not export the model: TypeError: unsupported operand type(s) for +"),
    (["--model", "net.py:unfit"], "could not export the model: RuntimeError"),
    (["--recipe", "none.yaml"], "selects no operator of the model"),
    (["--output", "."], "cannot write '.'"),
    (["--output", "nowhere/q.pt2"], "cannot write 'nowhere/q.pt2': it must be a file in a folder that exists"),
    (["--report", "nowhere/q.json"], "cannot write 'nowhere/q.json'"),
    (["--report", "q.txt"], "cannot write 'q.txt': its name must end in .json or .html or .htm"),
    (["--report", "q"], "cannot write 'q': its name must end in .json"),
    (["--output", "q.json", "--report", "./q.json"], "--output and --report are one file, './q.json'"),
    (["--recipe", "none.yaml", "--output", "none.yaml"], "--recipe and --output are one file"),
    (["--output", "net.py"], "the model and --output are one file, 'net.py'"),
    (["--output", "nowhere/../q.pt2"], "cannot write 'nowhere/../q.pt2': it must be a file in a folder that exists"),
    (["--output", "q.pt2/"], "cannot write 'q.pt2/'"),
    (["--output", "q.onnx"], "cannot write 'q.onnx': its name must end in .pt2; `pt2mx export-onnx` makes"),
    (["--report", "q.json/"], "cannot write 'q.json/'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_input_is_one_line_and_status_2(options, message, folder, capsys):
    (folder / "none.yaml").write_text("global: {}")
    before = {path.name for path in folder.iterdir()}
    assert quantize(*options) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pt2mx: error: ") and message in err and err.count("\n") == 1
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


def test_no_output_takes_the_place_of_a_calibration_batch(folder, capsys):
    calibration = batches(folder, a=(torch.randn(4, 64),))
    content = (folder / "batches" / "a.pt").read_bytes()
    assert quantize("--calibration", calibration, "--output", "batches/a.pt") == 2
    assert "the calibration batch 'a.pt' and --output are one file, 'batches/a.pt'" in capsys.readouterr().err
    assert (folder / "batches" / "a.pt").read_bytes() == content


def test_batches_without_values_compare_nothing(folder, capsys):
    assert quantize("--calibration", batches(folder, a=(torch.randn(0, 64),))) == 0
    line = "output against the float model: nothing was compared: no floating output holds a value"
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("model", "line"), [("broken", 'raise KeyError("first'), ("wrong_type", 'y = y + "text"')])
def test_errors_of_the_model_name_their_line(model, line, capsys):
    assert quantize(model=model) == 2
    number = next(i for i, text in enumerate(FACTORY.splitlines(), 1) if line in text)
    function = "helper" if model == "broken" else "forward"
    assert f" (net.py:{number} in {function})" in capsys.readouterr().err


def test_errors_of_a_calibration_batch_name_file_and_line(folder, capsys):
    calibration = batches(
        folder, good=(torch.randn(4, 64), torch.arange(4), 2), wild=(torch.randn(4, 64), torch.tensor([9]), 2)
    )
    assert quantize("--calibration", calibration, model="index") == 2
    number = next(i for i, text in enumerate(FACTORY.splitlines(), 1) if "[rows]" in text)
    err = capsys.readouterr().err
    assert "could not run the calibration batch batches/wild.pt through the model: IndexError: index 9 is out of" in err
    assert err.endswith(f"(net.py:{number} in forward)\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.randn(4, 63),), "the input 'x' must be of shape (0 to any, 64) and torch.float32, not (4, 63)"),
        (torch.randn(64), "the input 'x' must be of shape (0 to any, 64) and torch.float32, not (64,)"),
        (torch.zeros(4, 64, dtype=torch.int64), "the input 'x' must be of shape (0 to any, 64) and torch.float32, not"),
        (7, "the input 'x' must be of shape (0 to any, 64) and torch.float32, not 7"),
        ((torch.randn(4, 64), 7), "a batch must hold the inputs ['x'], this one holds 2 values"),
        ({"y": torch.randn(4, 64)}, "a batch must hold the inputs ['x'], this one holds ['y']"),
        ({"x": torch.full((4, 64), torch.inf)}, "NaN or Inf in batches/bad.pt: the inputs x"),
    ],
)
def test_batches_are_checked_before_the_export(batch, message, folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.export, "export", None)
    assert quantize("--calibration", batches(folder, bad=batch)) == 2
    out, err = capsys.readouterr()
    assert out == "" and "batches/bad.pt" in err and message in err and err.count("\n") == 1


def test_float64_arrays_are_cast_with_a_note(folder, capsys):
    calibration = batches(folder, a={"x": np.ones((2, 64))}, b={"x": np.ones((2, 64), np.float32)})
    assert quantize("--calibration", calibration) == 0
    assert capsys.readouterr().err == "pt2mx: batches/a.npz: x is cast from float64 to float32\n"


def test_an_int_of_a_batch_is_one_of_the_model(folder):
    assert quantize("--calibration", batches(folder, a=(torch.randn(5, 64), torch.arange(2), 7)), model="index") == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nan_weights", "NaN or Inf in the weights down.weight, down.bias"),
        ("nan_inside", "NaN or Inf in what is quantized: an operand of 2"),
        ("nan_sample", "NaN or Inf in built-in batch 0: the inputs x"),
    ],
)
def test_nan_is_an_error_by_name_or_allowed(model, message, folder, capsys):
    assert quantize(model=model) == 2
    err = capsys.readouterr().err
    assert err == f"pt2mx: error: {message}: fix it, or give --allow-nan to quantize anyway\n"
    assert not (folder / "out.pt2").exists()
    assert quantize("--allow-nan", model=model) == 0
    assert f"pt2mx: warning: {message}\n" in capsys.readouterr().err and (folder / "out.pt2").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX alone has the limits")
def test_a_full_disk_is_one_line_and_status_2(folder, run_python):
    (folder / "q.pt2").write_text("old")
    printed = run_python(FULL_DISK, ["quantize", "--model", "net.py:make", "--recipe", "mxfp8", "--output", "q.pt2"])
    assert printed.splitlines()[-2:] == ["pt2mx: error: cannot write 'q.pt2': File too large", "2"]
    assert (folder / "q.pt2").read_text() == "old"
