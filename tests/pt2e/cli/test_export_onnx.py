import importlib.util
import json
import re
import shlex

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import extras
from pt2mx.pt2e.cli import command
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.models.packaged import load_minilm, smollm2_checkpoint
from tests.documents import ROOT
from tests.flow import convert
from tests.language_models import decoder_by_recipe
from tests.onnx_float_files import branching_network, old_network
from tests.onnx_nodes import run

BATCH = ({0: torch.export.Dim("batch")},)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder of programs: a quantized one in float32 and in bfloat16, and a float one."""
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
    """Change to an empty folder, next to the programs."""
    monkeypatch.chdir(tmp_path)
    return programs


def export(*arguments):
    return command.main(["export-onnx", *map(str, arguments)])


@pytest.mark.parametrize("target", ["pt2mx", "quark"])
@pytest.mark.compiled_cases("pt2mx")
def test_prints_size_and_agreement(target, here, capsys, tmp_path):
    assert export(here / "net.pt2", "--output", "net.onnx", "--opset", "21", "--target", target) == 0
    first, second = capsys.readouterr().out.splitlines()
    written = tmp_path / "net.onnx"
    assert first.startswith(f"net.onnx: {written.stat().st_size:,} bytes (the program: ") and "), 4 MX nodes; " in first
    assert second.startswith("onnxruntime against the program: SQNR ") and "cosine 1.000000, largest diff" in second
    x = torch.randn(7, 64)
    with torch.no_grad():
        torch.testing.assert_close(run(str(written), x)[0], pt2mx.load_program(here / "net.pt2").module()(x))
    model = onnx.load(written)
    assert [entry.version for entry in model.opset_import if not entry.domain] == [21]
    values = (*model.graph.input, *model.graph.output)
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in values] == ["batch", "batch"]


@pytest.mark.compiled
def test_run_of_a_file(here, capsys, tmp_path):
    assert export(here / "net.pt2", "--output", "net.onnx") == 0
    x = torch.randn(3, 64)
    torch.save(x, "batch.pt")
    capsys.readouterr()
    assert main(["run", "net.onnx", "--inputs", "batch.pt", "--output", "out.pt", "--runtime", "onnxruntime"]) == 0
    given, result, seconds = capsys.readouterr().out.splitlines()
    assert given == "input: (3, 64) torch.float32" and result.endswith(": (3, 8) torch.float32")
    assert seconds.endswith(" ms a call on cpu in onnxruntime")
    (y,) = torch.load("out.pt").values()
    assert torch.equal(y, run(str(tmp_path / "net.onnx"), x)[0])


@pytest.mark.compiled
def test_runs_that_are_refused(here, capsys):
    assert export(here / "net.pt2", "--output", "net.onnx") == 0
    torch.save((torch.randn(3, 64), torch.randn(1)), "other.pt")
    torch.save(torch.randn(3, 65), "wide.pt")
    for arguments, message in (
        (("nowhere.onnx",), "no file 'nowhere.onnx': give a package, or an ONNX file"),
        (("net.onnx",), "an ONNX file has no example inputs: give --inputs, a .pt or .npz batch"),
        (
            ("net.onnx", "--inputs", "other.pt"),
            "other.pt: a batch must hold the inputs ['input'], this one holds [0, 1]",
        ),
        (("net.onnx", "--inputs", "wide.pt"), "could not run 'net.onnx' in onnxruntime: "),
    ):
        assert main(["run", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.compiled
def test_a_file_that_onnxruntime_does_not_run_is_written_all_the_same(here, capsys, tmp_path):
    assert export(here / "narrow.pt2", "--output", "net.onnx") == 0
    printed = capsys.readouterr().out
    assert "onnxruntime against the program: not compared: " in printed and "[ONNXRuntimeError]" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.compiled
def test_complex_outputs_are_not_compared(here, capsys, tmp_path):
    class Complex(nn.Linear):
        def forward(self, x):
            return torch.view_as_complex(super().forward(x).unflatten(-1, (4, 2)))

    x = torch.randn(4, 64)
    torch.export.save(torch.export.export(convert(Complex(64, 8), (x,)), (x,)), tmp_path / "complex.pt2")
    assert export("complex.pt2", "--output", "net.onnx") == 0
    assert "onnxruntime against the program: not compared: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_folder_of_a_language_model(here, capsys, tmp_path):
    fields = {"num_hidden_layers": 1, "eos_token_id": None}
    decoder_by_recipe("mxfp4_weight_only", "llama", **fields).save_pretrained(tmp_path / "quantized")
    assert export("quantized", "--output", "model.onnx") == 0
    size, agreement = capsys.readouterr().out.splitlines()
    program = (tmp_path / "quantized" / "program.pt2").stat().st_size
    assert f"bytes (the program: {program:,}), 9 MX nodes; " in size
    assert agreement.startswith("onnxruntime against the program: SQNR ") and "cosine 1.000000" in agreement
    assert {value.name for value in onnx.load("model.onnx").graph.input} > {"input_ids", "past_key_values.0.key"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{here}", "--output", "net.onnx"), "programs0' holds no program.pt2: give the folder that `pt2mx quantize`"),
        (("{here}/language", "--output", "net.onnx"), "language/program.pt2' is no PT2 archive"),
        (("{here}/float.pt2", "--output", "net.onnx"), "expected a converted model, not one without quantized tensors"),
        (("{here}/net.pt2", "--output", "no/net.onnx"), "it must be a file in a folder that exists"),
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


IMAGES = np.float32(np.random.RandomState(0).randn(2, 3, 8, 8))


@pytest.fixture
def network(tmp_path, monkeypatch):
    """A float file; the commands run in its folder."""
    np.random.seed(0)
    monkeypatch.chdir(tmp_path)
    onnx.save(old_network(13, 7), "net.onnx")
    (tmp_path / "batches").mkdir()
    np.savez(tmp_path / "batches" / "a.npz", x=IMAGES)
    torch.save(torch.from_numpy(IMAGES), tmp_path / "batches" / "b.pt")
    return tmp_path


def quantize(*options, recipe="mxfp8", model="onnx:net.onnx", output="out.onnx"):
    return main(["quantize", "--model", model, "--recipe", recipe, "--output", output, *options])


def test_a_file_becomes_one_that_onnxruntime_runs(network, capsys):
    assert quantize() == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:2] == ["module", "operator"]
    assert [line.split()[1] for line in out[1:6]] == ["Conv", "ConvTranspose", "Conv", "Gemm", "MatMul"]
    assert out[6].startswith("5 of 5 operators quantized; parameters ")
    assert out[7] == "the float file: 0.1 MB" and out[8].startswith("out.onnx: 0.") and "; load " in out[8]
    assert run("out.onnx", IMAGES)[0].shape == (2, 40)


def test_batches_and_a_report(network, capsys):
    assert quantize("--calibration", "batches", "--report", "report.json") == 0
    assert "output against the float model: SQNR " in capsys.readouterr().out
    report = json.loads((network / "report.json").read_text())
    assert [operator["operator"] for operator in report["operators"]][:2] == ["Conv", "ConvTranspose"]
    assert report["fidelity"][2] == 2 * 2 * 40


def test_what_lies_inside_a_branch_is_said(network, capsys):
    onnx.save(branching_network(), "net.onnx")
    assert quantize("--calibration", "none") == 0
    assert "inside the sub-graph of choice" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "given", "match"),
    [
        ((), {"model": "onnx:missing.onnx"}, "no file 'missing.onnx': give onnx:FILE"),
        ((), {"model": "onnx:"}, "no file '': give onnx:FILE"),
        ((), {"model": "onnx:batches/a.npz"}, "'batches/a.npz' is no ONNX file that can be read"),
        ((), {"output": "out.pt2"}, "cannot write 'out.pt2': its name must end in .onnx"),
        ((), {"output": "net.onnx"}, "are one file, 'net.onnx'"),
        ((), {"output": "nowhere/out.onnx"}, "it must be a file in a folder that exists"),
        ((), {"recipe": "mxfp9"}, "no recipe 'mxfp9'"),
        ((), {"recipe": "mxfp4_decoder"}, "algorithms is not for ONNX files"),
        (("--optimize", "fast"), {}, "--optimize is for PyTorch models"),
        (("--compile",), {}, "--compile is for PyTorch models"),
        (("--tensor-parallel", "2"), {}, "--tensor-parallel is for PyTorch models"),
        (("--calibration", "nowhere"), {}, "no file or folder 'nowhere': give a folder of batches"),
        (("--report", "report.txt"), {}, "its name must end in .json or .html or .htm"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(network, capsys, options, given, match):
    before = {file: file.read_bytes() for file in network.rglob("*") if file.is_file()}
    assert quantize(*options, **given) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("pt2mx: error: ") and match in line
    assert {file: file.read_bytes() for file in network.rglob("*") if file.is_file()} == before


def test_batches_that_do_not_fit(network, capsys):
    for name, batch in (
        ("c.npz", {"z": IMAGES}),
        ("c.npz", {"x": IMAGES[:, :2]}),
        ("c.npz", {"x": IMAGES, "z": IMAGES}),
    ):
        np.savez(network / "batches" / name, **batch)
        assert quantize("--calibration", "batches") == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("pt2mx: error: ") and ("must hold the inputs ['x']" in line or "batch 2: " in line)
        assert not (network / "out.onnx").exists()


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16), "could not make arrays of batches/b.pt: TypeError: "),
        ((torch.zeros(1), torch.zeros(1)), "b.pt: a batch must hold the inputs ['x'], this one holds [0, 1]"),
    ],
)
def test_batches_that_are_no_arrays_of_the_inputs(network, capsys, batch, match):
    torch.save(batch, network / "batches" / "b.pt")
    assert quantize("--calibration", "batches") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert match in line and not (network / "out.onnx").exists()


def test_weights_that_are_not_finite(network, capsys):
    model = old_network(13, 7)
    index = next(i for i, t in enumerate(model.graph.initializer) if t.name == "conv1.weight")
    bad = np.full((48, 3, 3, 3), np.inf, np.float32)
    model.graph.initializer[index].CopyFrom(onnx.numpy_helper.from_array(bad, "conv1.weight"))
    onnx.save(model, "net.onnx")
    assert quantize() == 2
    assert "NaN or Inf in the weights conv1.weight" in capsys.readouterr().err
    assert quantize("--allow-nan") == 0


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    """In order, those of OpenVINO where it is installed."""
    monkeypatch.chdir(tmp_path)
    np.random.seed(0)
    onnx.save(old_network(13, 7), "float.onnx")
    (tmp_path / "batches").mkdir()
    np.savez("batches/a.npz", x=IMAGES)
    torch.save(load_minilm()[1](["The first sentence.", "Another one."]), "batch.pt")
    commands = re.findall(r"^pt2mx .*$", (ROOT / "pt2e/onnx/README.md").read_text(), re.MULTILINE)
    assert len(commands) >= 5
    for line in commands:
        line = line.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2_checkpoint()))  # no network
        if "openvino" not in line or importlib.util.find_spec("openvino"):
            assert main(shlex.split(line)[1:]) == 0, line
