"""The program of Quark's tutorial on Microscaling, with its import line changed."""

import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader

from pt2mx import MXError
from pt2mx.quark import (
    CalibrationMethod,
    Config,
    ModelQuantizer,
    QuantizationConfig,
    VitisQuantFormat,
    VitisQuantType,
    mx_quantize_dequantize,
)
from tests.onnx_float_files import old_network

ATTRIBUTES = {"element_dtype": "int8", "axis": 1, "block_size": 8, "rounding_mode": 2}


class DataReader(CalibrationDataReader):
    def __init__(self, batches=2):
        np.random.seed(0)
        self.batches = iter([{"x": np.random.randn(2, 3, 8, 8).astype(np.float32)} for _ in range(batches)])

    def get_next(self):
        return next(self.batches, None)


@pytest.fixture
def input_model_path(tmp_path):
    np.random.seed(0)
    onnx.save(old_network(18, 10), tmp_path / "float.onnx")
    return str(tmp_path / "float.onnx")


def quantizer(**fields):
    quant_config = QuantizationConfig(
        calibrate_method=CalibrationMethod.MinMax,
        quant_format=VitisQuantFormat.MXFixNeuron,
        activation_type=VitisQuantType.QMX,
        weight_type=VitisQuantType.QMX,
        extra_options={"MXAttributes": ATTRIBUTES},
        **fields,
    )
    return ModelQuantizer(Config(global_quant_config=quant_config))


def test_the_tutorial(input_model_path, tmp_path, capsys):
    output_model_path = str(tmp_path / "quantized.onnx")
    made = quantizer()
    assert made.quantize_model(input_model_path, output_model_path, DataReader()) is None
    assert made.report.fidelity.cosine > 0.999
    assert "5 of 5 operators quantized" in made.report.to_table() and capsys.readouterr().out == ""
    onnxruntime.InferenceSession(output_model_path).run(None, DataReader().get_next())


def test_a_model_in_memory(input_model_path, tmp_path):
    made = quantizer()
    made.quantize_model(input_model_path, tmp_path / "quantized.onnx")
    assert made.report.fidelity is None
    model = made.quantize_model(onnx.load(input_model_path))
    assert model == onnx.load(tmp_path / "quantized.onnx")
    nodes = {node.output[0]: node for node in model.graph.node if node.domain == "com.amd.quark"}
    # the nodes of activations compute what Quark's do
    graph = onnx.helper.make_graph(
        [nodes["x_mx"]],
        "net",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None] * 4)],
        [onnx.helper.make_tensor_value_info("x_mx", onnx.TensorProto.FLOAT, [None] * 4)],
    )
    del model.graph.value_info[:]
    model.graph.CopyFrom(graph)
    x = DataReader().get_next()["x"]
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert np.array_equal(y, mx_quantize_dequantize(torch.from_numpy(x), ATTRIBUTES).numpy())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"calibration_data_path": "data"}, "calibration_data_path='data' is not honoured"),
        ({"algorithms": ["AdaRound"]}, "algorithms=.* are not honoured"),
        ({"calibration_data_reader": [{}]}, "has a method get_next"),
        ({"model_input": "nowhere.onnx"}, "'nowhere.onnx' is no ONNX file"),
    ],
)
def test_what_is_refused(input_model_path, tmp_path, arguments, match):
    with pytest.raises(MXError, match=match):
        quantizer().quantize_model(
            **{"model_input": input_model_path, "model_output": tmp_path / "q.onnx", **arguments}
        )
    assert not (tmp_path / "q.onnx").exists()


def test_a_field_that_is_set_later_is_checked_too(input_model_path, tmp_path):
    made = quantizer()
    made.config.include_cle = True
    with pytest.raises(MXError, match="include_cle=True is not honoured"):
        made.quantize_model(input_model_path, tmp_path / "q.onnx")


def test_without_onnx(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    for name in [name for name in sys.modules if name.startswith(("pt2mx.pt2e.onnx.", "pt2mx.quark.quantize_"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MXError, match=r"onnx is not installed: pip install 'pt2mx\[onnx\]'"):
        quantizer().quantize_model("float.onnx")
