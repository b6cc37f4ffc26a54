import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch

import pt2mx
from pt2mx.pt2e.cli.command import COMMANDS, main
from pt2mx.pt2e.files import output

FACTORY = """
import signal
import subprocess
import warnings
import torch
from torch import nn

class Interrupted(nn.Module):
    def forward(self, x):
        signal.raise_signal(signal.SIGINT)
        return x

class Swallowing(nn.Module):  # like code in C++
    def forward(self, x):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("unexpected pos 64 vs 0") from None

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16)), (torch.randn(4, 64),)

def talks():
    print("a factory that prints")
    return make()

def long_winded():
    from pt2mx import MXError
    raise MXError("of another\\n   library")

def runs():
    subprocess.run(["echo", "a process that prints"], check=True)
    return make()

def warns():
    print(warnings.formatwarning(UserWarning("careful"), UserWarning, "net.py", 1), end="")
    return make()

def interrupted():
    signal.raise_signal(signal.SIGINT)

def caught():  # as an import may do, which then raises another error
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return make()

def in_forward():
    return Interrupted(), (torch.randn(4, 64),)

def swallowed():
    return Swallowing(), (torch.randn(4, 64),)
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FACTORY)


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


@pytest.mark.compiled
def test_a_reader_that_went_away_ends_it_quietly(tmp_path):
    out, into = os.pipe()
    os.close(out)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "pt2mx", "formats"], stdout=into, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
    finally:
        os.close(into)
    assert (result.returncode, result.stderr) == (141, "")


#: an invalid command line for each command
BAD_INPUT = {
    "quantize": "--model net.py:make --recipe mxfp44",
    "slice": "none.pt2 --recipe mxfp4 --output o.pt2",
    "compile": "none.pt2 --output o.pt2",
    "generate": "nowhere",
    "perplexity": "nowhere --text none.txt --tokens 1",
    "eval": "nowhere --tasks gsm8k --limit 0",
    "compare": "net.py:make --calibration none",
    "sensitivity": "net.py:make --bits 4",
    "run": "none.pt2",
    "inspect": "none.pt2",
    "export-onnx": "none.pt2 --output o.onx",
    "export-executorch": "none.pt2 --output o.pt",
    "save-checkpoint": "nowhere --float nowhere --output o",
    "convert-checkpoint": "nowhere o",
    "card": "nowhere",
    "recipes": "show mxfp44",
    "formats": "mxfp4",
    "conformance": "--format mxfp44",
    "demo": "--output net.py/nowhere",
    "doctor": "torch",
    "completion": "tcsh",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("more", ["", " --json"])
def test_bad_input_is_one_line_and_status_2(command, more, factory, tmp_path, capsys):
    before = set(tmp_path.iterdir())
    try:
        status = main([command, *shlex.split(BAD_INPUT[command] + more)])
    except SystemExit as exit:  # argparse raises it
        status = exit.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and err.startswith("pt2mx: error: ") and err.count("\n") == 1
    assert set(tmp_path.iterdir()) - {tmp_path / "__pycache__"} == before


def test_processes_that_print_leave_json_alone(factory, capfd):
    assert main(["recipes", "check", "mxfp8", "--model", "net.py:runs", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["model"] == "net.py:runs" and err == "a process that prints\n"
    assert main(["formats"]) == 0 and capfd.readouterr().out.startswith("format")


def test_errors_of_several_lines_are_one(factory, capsys):
    assert main(["recipes", "check", "mxfp8", "--model", "net.py:long_winded"]) == 2
    assert capsys.readouterr() == ("", "pt2mx: error: of another library\n")


def test_warnings_are_lines_as_notes_are(factory, capsys):
    assert main(["recipes", "check", "mxfp8", "--model", "net.py:warns", "--json"]) == 0
    assert capsys.readouterr().err == "net.py: warning: careful\n"


def test_json_is_alone_on_stdout(factory, capsys):
    assert main(["quantize", "--model", "net.py:talks", "--recipe", "mxfp4", "--output", "q.pt2", "--json"]) == 0
    out, err = capsys.readouterr()
    actual = json.loads(out)
    assert err == "a factory that prints\n" and actual["output"] == "q.pt2"
    assert actual["bytes"] == os.path.getsize("q.pt2") and len(actual["report"]["operators"]) == 2
    assert list(actual["seconds"]) == ["load", "export", "calibrate", "convert", "compare", "save"]
    assert 10 < actual["output_against_the_float_model"]["sqnr"] < 40


@pytest.mark.slow_except("more1")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it is a device of Linux")
@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.compiled_cases("more1")
def test_no_place_for_the_result_is_one_line_and_status_2(more, tmp_path):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "pt2mx", "formats", *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
    assert result.returncode == 2
    assert result.stderr == "pt2mx: error: cannot write the result to stdout: No space left on device\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"pt2mx {pt2mx.__version__}\n"


@pytest.mark.parametrize("name", ["interrupted", "caught", "in_forward", "swallowed"])
def test_an_interrupt_is_one_line_and_status_130(name, factory, capsys):
    assert main(["quantize", "--model", f"net.py:{name}", "--recipe", "mxfp8"]) == 130
    assert capsys.readouterr() == ("", "pt2mx: interrupted\n")
    with pytest.raises(KeyboardInterrupt):  # the previous handler is back
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_while_the_program_is_written_leaves_the_old_one(factory, tmp_path, capsys, monkeypatch):
    (tmp_path / "q.pt2").write_text("old")
    write = output._File.write

    def interrupted(self, data):
        signal.raise_signal(signal.SIGINT)
        return write(self, data)

    monkeypatch.setattr(output._File, "write", interrupted)
    assert main(["quantize", "--model", "net.py:make", "--recipe", "mxfp8", "--output", "q.pt2"]) == 130
    assert capsys.readouterr() == ("", "pt2mx: interrupted\n")
    assert (tmp_path / "q.pt2").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} <= {"q.pt2", "net.py", "__pycache__"}


def test_the_traceback_goes_to_the_cause(factory, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("the cause")

    monkeypatch.setattr(torch.export, "export", fail)
    assert main(["quantize", "--model", "net.py:make", "--recipe", "mxfp8", "--traceback"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and "ValueError: the cause" in lines
    assert lines[-1].startswith("pt2mx: error: could not export the model: ValueError: the cause")
