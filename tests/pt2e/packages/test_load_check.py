import subprocess

import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.packages import package

CUDA = torch.device("cuda")


def _ends_with(status, stderr, monkeypatch):
    started = []

    def run(command, **options):
        started.append(command)
        return subprocess.CompletedProcess(command, status, "", stderr)

    monkeypatch.setattr(package.subprocess, "run", run)
    return started


def test_code_for_a_cpu_is_not_loaded(monkeypatch):
    started = _ends_with(-11, "", monkeypatch)
    package.check_loads("m.pt2", torch.device("cpu"))
    assert not started


def test_code_that_loads(monkeypatch):
    started = _ends_with(0, "", monkeypatch)
    package.check_loads("m.pt2", CUDA)
    assert [command[-1] for command in started] == ["m.pt2"]


@pytest.mark.parametrize(
    "status, stderr, message",
    [
        (-11, "", r"crashes while torch .* \(signal 11\).*set CXX"),
        (1, "Traceback\nKeyError: 3\n", "loaded: KeyError: 3"),
    ],
)
def test_code_that_does_not_load(status, stderr, message, monkeypatch):
    _ends_with(status, stderr, monkeypatch)
    with pytest.raises(MXError, match=message):
        package.check_loads("m.pt2", CUDA)


@pytest.mark.slow  # an interpreter imports torch
def test_a_real_child_process(tmp_path):
    path = tmp_path / "m.pt2"
    path.write_bytes(b"no package")
    with pytest.raises(MXError, match="the machine code for cuda cannot be loaded"):
        package.check_loads(str(path), CUDA)
