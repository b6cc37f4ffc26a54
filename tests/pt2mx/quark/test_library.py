import os

import onnxruntime
import pytest

from pt2mx import MXError, quark
from pt2mx.quark import library


def test_onnxruntime_registers_it():
    path = quark.get_library_path()
    assert path == quark.get_library_path("cuda", "custom_ops") and os.path.isfile(path)
    onnxruntime.SessionOptions().register_custom_ops_library(path)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("TPU",), "unknown device 'TPU': .*allowed: CPU, CUDA, ROCM"),
        ((None,), "unknown device None"),
        (("CPU", "other"), "unknown lib 'other': allowed: custom_ops"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(MXError, match=match):
        quark.get_library_path(*arguments)


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "use_built", lambda *arguments: tmp_path / "gone.so")
    with pytest.raises(MXError, match="name a folder in TORCH_EXTENSIONS_DIR"):
        quark.get_library_path()


def test_no_compiler(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(library, "use_built", fails)
    with pytest.raises(MXError, match=r"cannot build register.cpp: install a C\+\+ compiler, .*\(no compiler\)"):
        quark.get_library_path()
