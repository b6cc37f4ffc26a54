import os
import signal
import subprocess
import sys

import pytest
import torch

import pt2mx
from pt2mx.pt2e import output
from pt2mx.pt2e.cli.command import main

FACTORY = """
import signal
import torch
from torch import nn

class Interrupted(nn.Module):
    def forward(self, x):
        signal.raise_signal(signal.SIGINT)
        return x

class Swallowing(nn.Module):  # as code in C++ does
    def forward(self, x):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("unexpected pos 64 vs 0") from None

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16)), (torch.randn(4, 64),)

def interrupted():
    signal.raise_signal(signal.SIGINT)

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


def test_every_command_prints_tracebacks(capsys):
    for command in ("quantize", "compile", "run", "formats"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--traceback" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"pt2mx {pt2mx.__version__}\n"


@pytest.mark.parametrize("name", ["interrupted", "in_forward", "swallowed"])
def test_an_interrupt_is_one_line_and_status_130(name, factory, capsys):
    assert main(["quantize", "--model", f"net.py:{name}", "--recipe", "mxfp8"]) == 130
    assert capsys.readouterr() == ("", "pt2mx: interrupted\n")
    with pytest.raises(KeyboardInterrupt):  # the handler of before is back
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
