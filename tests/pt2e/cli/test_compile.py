import contextlib
import io
import json
import os
import shutil
import threading
import time
import zipfile

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor import config

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, load_package, lower_to_inductor
from pt2mx.pt2e.cli import float_speed
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.cli.float_model import export
from pt2mx.pt2e.files.archive import add_records
from pt2mx.pt2e.inspect.inspect_file import inspect_file
from pt2mx.pt2e.inspect.schema import TensorInfo
from pt2mx.pt2e.packages.compile import compile_program
from pt2mx.pt2e.program import provenance
from tests.models import module_of

#: runs a package in another process, and compares the bits
IN_ANOTHER_PROCESS = """
import sys
import torch
if sys.argv[1] == "with":
    import pt2mx
else:
    sys.modules["pt2mx"] = None  # importing it fails
model = torch._inductor.aoti_load_package(sys.argv[2])
for name in sys.argv[3:]:
    args, want = torch.load(name)
    got = model(*args)
    print(torch.equal(got, want), float((got - want).norm() / want.norm()))
"""


def net():  # (B, S, 70), (B, 1, 128) -> (B, S, 16)
    """Return ragged blocks, layers with and without a bias. Everything except the matmuls is exact.

    No quantization follows a matmul, because it could turn a difference in the last bit into a step."""
    up, down = nn.Linear(70, 128), nn.Linear(128, 16, bias=False)
    return module_of(lambda self, x, gate: self.down(torch.relu(self.up(x)) * gate), up=up, down=down)


def inputs(batch, sequence):
    return torch.randn(batch, sequence, 70), torch.randn(batch, 1, 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A quantized program, its packages, and their expected outputs."""
    path = tmp_path_factory.mktemp("compile")
    torch.manual_seed(0)
    batch, sequence = torch.export.Dim("batch", max=99), torch.export.Dim("sequence")
    shapes = {"x": {0: batch, 1: sequence}, "gate": {0: batch}}
    quantizer = MXQuantizer.from_recipe("mxfp8").set_module_name(
        "down", get_default_mx_quantization_config("mxfp4", None)
    )
    args = inputs(4, 3)
    prepared = pt2mx.prepare_pt2e(export(net().eval(), args, shapes).module(), quantizer)
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.save_program(export(converted, args, shapes), path / "net.pt2", quantizer)
    lowered = lower_to_inductor(converted)
    for i, args in enumerate([inputs(4, 3), inputs(1, 1), inputs(99, 7)]):
        with torch.no_grad():
            assert torch.allclose(lowered(*args), converted(*args), rtol=1e-5, atol=1e-5)
            torch.save((args, lowered(*args)), path / f"lowered{i}.pt")
            torch.save((args, converted(*args)), path / f"converted{i}.pt")
    write_package(path, "net.aoti.pt2")
    return path


def write_package(path, name, *options):
    """A package of the program, and next to it the output of the command."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command = ["compile", str(path / "net.pt2"), "--output", str(path / name), "--no-benchmark", *options]
        assert main(command) == 0
    (path / f"{name}.txt").write_text(printed.getvalue())


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.compiled
def test_package_gives_the_bits_of_the_lowered_model_in_another_process(here, run_python):
    arguments = ["with", "net.aoti.pt2", *(f"lowered{i}.pt" for i in range(3))]
    assert run_python(IN_ANOTHER_PROCESS, arguments, cwd=here).split()[::2] == ["True"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("portable.pt2", ["--portable"]), ("unpacked.pt2", ["--portable", "--unpack"])]
)
def test_portable_package_runs_without_pt2mx(name, options, here, run_python):
    """The package dequantizes the weight to the bit and calls the same matmul as eager mode."""
    write_package(here, name, *options)
    check_printed(here, name)
    arguments = ["without", name, *(f"converted{i}.pt" for i in range(3))]
    printed = run_python(IN_ANOTHER_PROCESS, arguments, cwd=here).split()
    assert all(float(error) < 1e-6 for error in printed[1::2])


@pytest.mark.parametrize("path", ["net", "missing/net.pt2", "."])
def test_where_no_package_can_be_written(path, here):
    with pytest.raises(pt2mx.MXError, match="cannot write"):
        compile_program(torch.export.load("net.pt2"), here / path)


def test_several_threads_and_calls_in_turn(here):
    package = load_package("net.aoti.pt2")
    args, expected = torch.load("lowered2.pt")
    equal = []

    def call():
        for _ in range(5):
            equal.append(torch.equal(package(*args), expected))

    threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert equal == [True] * 20


def test_compile_prints_how_well_it_agrees(here):
    check_printed(here, "net.aoti.pt2")


def check_printed(folder, name):
    """Check what the command printed when it wrote a package."""
    fidelity, sizes = (folder / f"{name}.txt").read_text().splitlines()
    assert fidelity.startswith("compiled against eager: SQNR ") and fidelity.endswith("cosine 1.000000")
    assert float(fidelity.split()[4]) > 100
    package, program = ((folder / file).stat().st_size / 1e6 for file in (name, "net.pt2"))
    assert f"{name}: {package:.1f} MB (the program: {program:.1f} MB); load " in sizes and sizes.endswith(" s")


def test_inspect_of_a_package(here, capsys):
    (program,), (package,) = (inspect_file(here / name) for name in ("net.pt2", "net.aoti.pt2"))
    assert (package.kind, package.origin, package.target["AOTI_DEVICE_KEY"]) == ("package", program.origin, "cpu")
    x, gate = ("0..99", "0..", 70), ("0..99", 1, 128)
    assert package.inputs == (TensorInfo("x", "float32", x), TensorInfo("gate", "float32", gate))
    assert package.operators == {"pt2mx.linear_mx": 2, "pt2mx.rotated_fake_quantize_mx": 1}
    assert set(package.tensors) == set(program.tensors)
    for ours, theirs in zip(package.weights, program.weights, strict=True):
        fields = [(one.name, one.format, one.axis, one.shape, one.bytes) for one in (ours, theirs)]
        assert fields[0] == fields[1] and ours.scales is None
    assert main(["inspect", "net.aoti.pt2"]) == 0
    out = capsys.readouterr().out
    assert "a package of" in out and "for: cpu, " in out


@pytest.mark.parametrize("kind", ["example", "tuple.pt", "names.npz"])
@pytest.mark.compiled_cases("tuple.pt", "names.npz")
def test_run_prints_and_writes(kind, here, capsys):
    args, expected = torch.load("lowered2.pt")
    torch.save(args, "tuple.pt")
    np.savez("names.npz", **{name: t.numpy() for name, t in zip(("x", "gate"), args, strict=True)})
    options = [] if kind == "example" else ["--inputs", kind]
    assert main(["run", "net.aoti.pt2", "--output", "out.pt", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    batch, sequence = (4, 3) if kind == "example" else (99, 7)
    assert lines[:3] == [
        f"x: ({batch}, {sequence}, 70) torch.float32",
        f"gate: ({batch}, 1, 128) torch.float32",
        f"output: ({batch}, {sequence}, 16) torch.float32",
    ]
    assert lines[3].endswith(" ms a call on cpu") and float(lines[3].split()[0]) > 0 and len(lines) == 4
    if kind == "example":
        program = torch.export.load("net.pt2")
        args, kwargs = program.example_inputs
        torch.testing.assert_close(torch.load("out.pt"), program.module()(*args, **kwargs), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(torch.load("out.pt"), expected)


@pytest.fixture
def compiled_float(monkeypatch):
    """(program, inputs, dtype) of the float models that would be compiled; their calls do nothing."""
    asked = []

    def compiled(program, inputs, dtype, device, folder):
        asked.append((program, inputs, dtype))
        return lambda: time.sleep(0.01)

    monkeypatch.setattr(float_speed, "_compiled", compiled)
    return asked


@pytest.mark.compiled
def test_compile_times_the_package_beside_the_program_in_float(here, compiled_float, monkeypatch, capsys):
    def copied(program, path, *options):
        shutil.copy("net.aoti.pt2", path)

    monkeypatch.setattr("pt2mx.pt2e.cli.compile.compile_program", copied)
    assert main(["compile", "net.pt2", "--output", "timed.pt2"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[3:6]] == ["package", "bfloat16", "float32"]
    assert "bfloat16 and float32: the model without quantization, compiled in the same way" in out
    assert [dtype for *_, dtype in compiled_float] == [torch.bfloat16, torch.float32]
    assert main(["compile", "net.pt2", "--output", "timed.pt2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["speed"]["rows"]
    assert [row["name"] for row in rows] == ["package", "bfloat16", "float32"]
    assert main(["compile", "net.pt2", "--output", "timed.pt2", "--no-benchmark", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speed"] is None and len(compiled_float) == 4


@pytest.mark.compiled
def test_run_times_the_package_beside_a_program(here, compiled_float, capsys):
    args, _ = torch.load("lowered2.pt")
    torch.save(args, "tuple.pt")
    options = ["run", "net.aoti.pt2", "--inputs", "tuple.pt", "--benchmark"]
    assert main(options) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[4].startswith("net.aoti.pt2 ") and " thread" in out.splitlines()[5]
    assert "does not hold its float model: --float PROGRAM, what was compiled, times it beside" in err
    assert main([*options, "--float", "net.pt2", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["speed"]["rows"]
    assert [row["name"] for row in rows] == ["net.aoti.pt2", "bfloat16", "float32"]
    assert rows[0]["times_as_long"].keys() == {"bfloat16", "float32"} and "does not hold" not in err
    program, (shown, _), _ = compiled_float[0]
    assert program.example_inputs is not None and torch.equal(shown[0], args[0])


@pytest.mark.compiled
def test_the_float_models_of_a_program_and_of_a_float_program(here, capsys):
    torch.export.save(torch.export.export(net().eval(), inputs(4, 3)), "float.program.pt2")
    for program in ("net.pt2", "float.program.pt2"):
        assert main(["run", "net.aoti.pt2", "--benchmark", "--float", program, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["speed"]["rows"]
        assert all(row["milliseconds"]["low"] > 0 for row in rows) and len(rows) == 3


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (inputs(100, 3), "input 'x' must be of shape (0 to 99, 0 to any, 70) and torch.float32, not (100, 3, 70)"),
        (torch.randn(4, 3, 70), "must hold the inputs ['x', 'gate'], this one holds 1 values"),
        ({"x": torch.randn(4, 3, 70), "gates": torch.randn(4, 1, 128)}, "this one holds ['gates', 'x']"),
        ((torch.randn(4, 3, 70).half(), torch.randn(4, 1, 128)), "not (4, 3, 70) torch.float16"),
        ((torch.randn(4, 70), torch.randn(4, 1, 128)), "not (4, 70) torch.float32"),
    ],
)
def test_batches_that_a_package_does_not_take(batch, message, here, capsys):
    """AOTInductor would read past the end of an input with another shape."""
    torch.save(batch, "batch.pt")
    assert main(["run", "net.aoti.pt2", "--inputs", "batch.pt"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pt2mx: error: ") and message in err and err.count("\n") == 1


@pytest.mark.compiled
def test_run_casts_float64_with_a_note(here, capsys):
    args, expected = torch.load("lowered2.pt")
    np.savez("double.npz", *(t.double().numpy() for t in args))
    assert main(["run", "net.aoti.pt2", "--inputs", "double.npz", "--output", "out.pt"]) == 0
    notes = [f"pt2mx: double.npz: {name} is cast from float64 to float32" for name in ("x", "gate")]
    assert capsys.readouterr().err.splitlines() == notes and torch.equal(torch.load("out.pt"), expected)


@pytest.mark.compiled
def test_files_of_another_version_are_noted(here, capsys, monkeypatch):
    pt2mx.save_program(torch.export.load("net.pt2"), "versioned.pt2")
    monkeypatch.setattr(provenance, "__version__", "9.9")
    assert main(["run", "net.aoti.pt2"]) == 0
    line = f"was written by pt2mx {pt2mx.__version__}, and this is 9.9: compare its numbers\n"
    assert capsys.readouterr().err == f"pt2mx: 'net.aoti.pt2' {line}"
    monkeypatch.setattr(torch.export, "load", lambda path: 1 / 0)  # the note comes before
    assert main(["compile", "versioned.pt2", "--output", "o.pt2"]) == 2
    assert capsys.readouterr().err.startswith(f"pt2mx: 'versioned.pt2' {line}pt2mx: error: could not load")


def test_a_program_with_a_broken_record_is_compiled_all_the_same(here, capsys, monkeypatch):
    with zipfile.ZipFile("net.pt2") as program, zipfile.ZipFile("broken.pt2", "w") as broken:
        for name in program.namelist():
            if not name.endswith("pt2mx.json"):
                broken.writestr(name, program.read(name))
    add_records("broken.pt2", {"extra/pt2mx.json": b"{"})
    monkeypatch.setattr("pt2mx.pt2e.cli.compile.compile_program", lambda *args: 1 / 0)  # the program holds no recipe
    assert main(["compile", "broken.pt2", "--output", "o.pt2"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "pt2mx: 'broken.pt2' does not say what wrote it: its record pt2mx.json is broken"
    assert second.startswith("pt2mx: error: could not compile the program: ZeroDivisionError")


@pytest.fixture(scope="module")
def unfit_files(folder):
    """The program, and files that no command takes."""
    for name in ("text.pt2", "text.pt"):
        (folder / name).write_text("no archive")
    torch.save(torch.randn(4), folder / "other.pt2")
    torch.export.save(torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),)), folder / "float.pt2")
    portable = pt2mx.make_portable(torch.export.load(folder / "net.pt2"))
    torch.export.save(portable, folder / "portable.program.pt2")
    with zipfile.ZipFile(folder / "bare.pt2", "w") as archive:
        archive.writestr("bare/data/aotinductor/model/code.cpp", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "nowhere.pt2", "--output", "o.pt2"], "no file 'nowhere.pt2'"),
        (["compile", "text.pt2", "--output", "o.pt2"], "'text.pt2' is no PT2 archive: give what `pt2mx quantize`"),
        (["compile", "other.pt2", "--output", "o.pt2"], "'other.pt2' is no program: give what"),
        (["compile", "net.aoti.pt2", "--output", "o.pt2"], "'net.aoti.pt2' is no program, but a package"),
        (["compile", "float.pt2", "--output", "o.pt2"], "without quantized tensors"),
        (["compile", "portable.program.pt2", "--output", "o.pt2"], "not a portable program, whose operators are"),
        (["compile", "net.pt2", "--output", "./net.pt2"], "the program and --output are one file, './net.pt2'"),
        (["run", "net.aoti.pt2", "--output", "net.aoti.pt2"], "cannot write 'net.aoti.pt2': its name must end in .pt"),
        (["run", "net.aoti.pt2", "--inputs", "text.pt", "--output", "text.pt"], "--inputs and --output are one file"),
        (["compile", "net.pt2", "--output", "nowhere/o.pt2"], "cannot write 'nowhere/o.pt2': it must be a file"),
        (["compile", "net.pt2", "--output", "o.so"], "cannot write 'o.so': the name of a package ends in .pt2"),
        (["run", "net.pt2"], "'net.pt2' is no package, but a program: give what `pt2mx compile` wrote"),
        (["run", "net.aoti.pt2", "--inputs", "nowhere.pt"], "no file or folder 'nowhere.pt': give a .pt or .npz batch"),
        (["run", "net.aoti.pt2", "--inputs", "text.pt2"], "text.pt2 is no batch"),
        (["run", "net.aoti.pt2", "--output", "."], "cannot write '.'"),
        (["run", "bare.pt2"], "'bare.pt2' does not say how to call it"),
        (["run", "net.onnx", "--inputs", "text.pt", "--benchmark"], "--benchmark is for packages: leave it out"),
        (["run", "net.aoti.pt2", "--float", "net.pt2"], "--float goes with --benchmark: the program to"),
        (["run", "net.aoti.pt2", "--benchmark", "--float", "nowhere.pt2"], "no file 'nowhere.pt2'"),
        (
            ["run", "net.aoti.pt2", "--benchmark", "--float", "net.aoti.pt2"],
            "'net.aoti.pt2' is no program, but a package",
        ),
    ],
)
@pytest.mark.usefixtures("here", "unfit_files")
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pt2mx: error: ") and message in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(here, capsys):
    assert main(["compile", "net.pt2", "--output", "o.pt2", "--device", "cuda"]) == 2
    assert "--device cuda needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "net.pt2", "--output", "o.pt2"],
        ["quantize", "--model", "minilm", "--recipe", "mxfp4", "--output", "o.pt2", "--compile"],
    ],
)
def test_without_a_compiler(arguments, here, capsys):
    with config.patch({"cpp.cxx": ("no-compiler",)}):
        assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no C++ compiler" in line and "no-compiler" in line and "name one in CXX" in line


@pytest.mark.compiled
@pytest.mark.parametrize("portable", [False, True])
def test_minilm(portable, minilm, tmp_path, run_python):
    """Dynamic batch and sequence, packed weights: the package is little more than the program."""
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(minilm.program.module(), quantizer))
    path, expected = str(tmp_path / "minilm.pt2"), tmp_path / "want.pt"
    compile_program(export(converted, minilm.args, minilm.shapes), path, portable=portable)
    size = sum(t.nbytes for t in minilm.program.state_dict.values())
    assert os.path.getsize(path) < 0.18 * size
    assert load_package(path).signature.ranges[0] == [(1, None), (1, 512)]  # the encoder refuses an empty sequence
    with torch.no_grad():
        torch.save((minilm.inputs, converted(*minilm.inputs)), expected)
    printed = run_python(IN_ANOTHER_PROCESS, ["without" if portable else "with", path, str(expected)]).split()
    assert float(printed[1]) < 1e-5
