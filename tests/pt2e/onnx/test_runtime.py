import importlib.util

import numpy as np
import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.onnx.runtime import load
from tests.flow import convert


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a file of each target."""
    folder, x = tmp_path_factory.mktemp("files"), torch.randn(4, 64)
    converted = convert(nn.Linear(64, 8).eval(), (x,), "mxfp4")
    for target in ("pt2mx", "standard"):
        pt2mx.export_onnx(converted, folder / f"{target}.onnx", (x,), target=target)
    (folder / "empty.onnx").touch()
    return folder, x, converted(x)


@pytest.mark.parametrize("runtime", [None, "onnxruntime"])
@pytest.mark.compiled_cases("None")
def test_arrays_have_the_names_of_the_file(files, runtime):
    folder, x, want = files
    model = load(folder / "pt2mx.onnx", runtime)
    assert (model.runtime, model.inputs) == ("onnxruntime", ["input"])
    ((name, y),) = model.call({"input": x.numpy()}).items()
    assert name == "linear" and np.allclose(y, want, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "runtime", "message"),
    [
        ("pt2mx.onnx", "openvin", "unknown runtime 'openvin': did you mean 'openvino'"),
        ("standard.onnx", "onnxruntime", "does not run here: onnxruntime does not take it: .*the target 'openvino'"),
        ("empty.onnx", "onnxruntime", "'.*empty.onnx' does not run here: onnxruntime does not take it"),
    ],
)
def test_bad_input(files, file, runtime, message):
    with pytest.raises(MXError, match=message):
        load(files[0] / file, runtime)


def test_without_runtimes(files, monkeypatch):
    """An error names both runtimes, and the extra of one that was asked for."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MXError, match=r"neither onnxruntime nor openvino is installed.*\[onnx\]' or .*\[openvino\]'"):
        load(files[0] / "pt2mx.onnx")
    with pytest.raises(MXError, match=r"openvino is not installed: pip install 'pt2mx\[openvino\]'"):
        load(files[0] / "pt2mx.onnx", "openvino")


def test_operators_that_openvino_lacks_are_named(files):
    pytest.importorskip("openvino")
    with pytest.raises(MXError, match=r"No conversion rule found for operations: pt2mx\.DequantizeMX"):
        load(files[0] / "pt2mx.onnx", "openvino")
