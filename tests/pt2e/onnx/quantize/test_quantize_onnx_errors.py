import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, MXSpec, quantize_onnx
from pt2mx.pt2e.onnx.nodes import FakeQuantizeMX
from tests.onnx_float_files import model_of, old_network
from tests.onnx_nodes import run
from tests.onnx_quantized_files import FP4, IMAGES, WEIGHTS


def damaged(folder):
    (folder / "float.onnx").write_bytes(b"no model")


def empty(folder):
    (folder / "float.onnx").write_bytes(b"")


def saved(model):
    return lambda folder: onnx.save(model(), folder / "float.onnx")


def doubles():
    nodes = [helper.make_node("MatMul", ["x", "x"], ["h"], "matmul"), helper.make_node("Cast", ["h"], ["y"], to=1)]
    return model_of(nodes, {"x": (TensorProto.DOUBLE, [8, 8])}, {"y": 2}, {})


def not_finite():
    model = old_network(18, 10)
    bad = np.full((24, 36), np.nan, np.float32)
    model.graph.initializer[4].CopyFrom(numpy_helper.from_array(bad, "fc.weight"))
    return model


def without_matmuls():
    return model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": (TensorProto.FLOAT, [3])}, {"y": 1}, {})


def quantized_already():
    node = FakeQuantizeMX(MXSpec("fp4_e2m1")).make(["x"], "y", "mine")
    model = without_matmuls()
    model.graph.node[0].CopyFrom(node)
    model.opset_import.append(helper.make_opsetid("pt2mx", 1))
    return model


def unconvertible():
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Upsample", ["h", "s"], ["y"])]
    inputs = {"x": (TensorProto.FLOAT, [1, 1, 3, 3])}
    model = model_of(nodes, inputs, {"y": 4}, {"s": np.float32([1, 1, 2, 2])}, 9)
    model.opset_import[0].version = 5
    return model


@pytest.mark.parametrize(
    ("write", "config", "match"),
    [
        (damaged, FP4, "is no ONNX file that can be read"),
        (empty, FP4, "holds no graph"),
        (lambda folder: None, FP4, "is no ONNX file that can be read: .*No such file"),
        (saved(doubles), FP4, "MatMul 'matmul' computes in float64"),
        (saved(not_finite), FP4, "NaN or Inf in the weights fc.weight"),
        (saved(without_matmuls), FP4, "nothing to quantize in .*: it holds no MatMul"),
        (saved(quantized_already), FP4, "FakeQuantizeMX 'mine' of domain 'pt2mx': the file is quantized already"),
        (saved(unconvertible), FP4, "opset 5 cannot be converted to 18"),
        (saved(lambda: old_network(18, 10)), "mxfp9", "no recipe 'mxfp9'"),
        (saved(lambda: old_network(18, 10)), 4, "config must be an MXQuantizer, an MXQuantizationConfig"),
        (saved(lambda: old_network(18, 10)), {"element_dtype": "fp9"}, "unknown element_dtype 'fp9'"),
        (saved(lambda: old_network(18, 10)), {"elements": "fp8_e4m3"}, "MXAttributes have no 'elements'"),
        (saved(lambda: old_network(18, 10)), MXQuantizationConfig(), "the config names no spec for its operands"),
        (saved(lambda: old_network(18, 10)), MXQuantizationConfig(activation="mxfp8{32}(mse)"), "hold the scale modes"),
        (saved(lambda: old_network(18, 10)), "mxfp4_decoder", "algorithms is not for ONNX files"),
        (saved(lambda: old_network(18, 10)), MXQuantizer().set_small_weights(None, 9), "small_weights is not for ONNX"),
    ],
)  # fmt: skip
def test_errors_leave_nothing_behind(tmp_path, write, config, match):
    write(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MXError, match=match):
        quantize_onnx(tmp_path / "float.onnx", tmp_path / "mx.onnx", config)
    assert sorted(tmp_path.iterdir()) == before


def test_errors_of_files_and_batches(tmp_path):
    onnx.save(old_network(18, 10), tmp_path / "float.onnx")
    path = tmp_path / "float.onnx"
    with pytest.raises(MXError, match="are one file"):
        quantize_onnx(path, path, FP4)
    with pytest.raises(MXError, match="it must be a file in a folder that exists"):
        quantize_onnx(path, tmp_path / "nowhere" / "mx.onnx", FP4)
    with pytest.raises(MXError, match="batch 1: "):
        quantize_onnx(path, tmp_path / "mx.onnx", FP4, [{"x": IMAGES}, {"z": IMAGES}])
    for batches, match in (
        ({"x": IMAGES}, "calibration must be a list of batches by name, not of type dict"),
        (3, "calibration must be a list of batches by name, not of type int"),
        ([IMAGES], "batch 0 must be a mapping of inputs by name, not of type ndarray"),
    ):
        with pytest.raises(MXError, match=match):
            quantize_onnx(path, tmp_path / "mx.onnx", FP4, batches)
    assert not (tmp_path / "mx.onnx").exists()
    onnx.save(not_finite(), path)
    quantize_onnx(path, tmp_path / "mx.onnx", WEIGHTS, allow_nan=True)
    assert run(str(tmp_path / "mx.onnx"), IMAGES)[0].shape == (2, 40)
