import numpy as np
import pytest
from onnx import TensorProto, helper

from pt2mx import MXQuantizationConfig
from tests.onnx_float_files import (
    model_of,
    old_network,
    recurrent_network,
    weight,
)
from tests.onnx_nodes import differences
from tests.onnx_quantized_files import IMAGES, quantized, specs


def test_gathers_of_other_tensors_are_no_embeddings(tmp_path):
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "shape"),
        helper.make_node("Gather", ["s", "one"], ["n"], "length", axis=0),
        helper.make_node("Gather", ["x", "one"], ["row"], "row", axis=0),
        helper.make_node("Gather", ["table", "one"], ["column"], "column", axis=1),
        helper.make_node("MatMul", ["x", "table"], ["y"], "matmul"),
    ]
    floats = model_of(
        nodes, {"x": (TensorProto.FLOAT, [3, 40])}, {"y": 2}, {"table": weight(40, 8), "one": np.array(1)}
    )
    report, _ = quantized(floats, tmp_path)
    assert [(o.name, o.quantized) for o in report.operators] == [("matmul", True)]


def attention():
    """Return a model of softmax(q k^T) v, with two casts after the softmax."""
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], "", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"], "scores"),
        helper.make_node("Softmax", ["scores"], ["p"], "", axis=-1),
        helper.make_node("Cast", ["p"], ["pd"], "", to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["pd"], ["pf"], "", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["pf", "v"], ["y"], "values"),
    ]
    inputs = {name: (TensorProto.FLOAT, [2, 36, 16]) for name in "qkv"}
    return model_of(nodes, inputs, {"y": 3}, {})


@pytest.mark.parametrize(("blocks", "axis", "length"), [("head_dim", -1, 16), ("key_length", 1, 36)])
def test_values_of_an_attention(tmp_path, blocks, axis, length):
    config = MXQuantizationConfig(activation="mxfp8", value_blocks=blocks)
    report, model = quantized(attention(), tmp_path, config)
    assert specs(model) == {
        "q_mx": ("fp8_e4m3", 32, -1, 16),
        "kt_mx": ("fp8_e4m3", 32, 1, 16),
        "pf_mx": ("fp8_e4m3", 32, -1, 36),
        "v_mx": ("fp8_e4m3", 32, axis, length),
    }
    assert bool(report.operators[1].remark) == (blocks == "key_length")
    assert set(differences(model, {name: weight(2, 36, 16) for name in "qkv"}).values()) == {0}


def test_output_and_bias(tmp_path):
    config = MXQuantizationConfig(weight="mxfp4", output="mxfp8", bias="mxint8{16}")
    _, model = quantized(old_network(18, 10), tmp_path, config)
    by_output = specs(model)
    assert by_output["fc.bias_mx"] == ("int8", 16, -1, 24) and by_output["g"] == ("fp8_e4m3", 32, -1, 24)
    assert [value.name for value in model.graph.output] == ["y"]
    assert set(differences(model, {"x": IMAGES}).values()) == {0}


def test_output_of_an_embedding(tmp_path):
    config = MXQuantizationConfig(weight="mxfp4", output="mxfp8")
    floats = model_of(
        [helper.make_node("Gather", ["table", "ids"], ["y"], "embed")],
        {"ids": (TensorProto.INT64, [None])}, {"y": 2}, {"table": weight(20, 40)},
    )  # fmt: skip
    _, model = quantized(floats, tmp_path, config)
    assert specs(model) == {"y": ("fp8_e4m3", 32, -1, 40), "y_float": ("fp4_e2m1", 32, -1, 40)}
    assert set(differences(model, {"ids": np.array([3, -1, 7])}).values()) == {0}


def test_only_used_outputs_of_recurrent_layers_are_quantized(tmp_path):
    _, model = quantized(recurrent_network(), tmp_path, MXQuantizationConfig(weight="mxfp4", output="mxint8"))
    assert {name: spec for name, spec in specs(model).items() if spec[0] == "int8"} == {
        "e": ("int8", 32, -1, 40),
        "h": ("int8", 32, -1, 20),
        "y": ("int8", 32, -1, 70),
    }
    assert set(differences(model, {"ids": np.random.randint(0, 70, (5, 3))}).values()) == {0}


def test_a_default_of_an_input_is_no_constant(tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("MatMul", ["h", "v"], ["y"], "second"),
    ]
    inputs = {"x": (TensorProto.FLOAT, [3, 40]), "w": (TensorProto.FLOAT, [40, 40])}
    floats = model_of(nodes, inputs, {"y": 2}, {"w": weight(40, 40), "v": weight(40, 40)})
    _, model = quantized(floats, tmp_path)
    assert specs(model)["w_mx"] == ("fp8_e4m3", 32, 0, 40)  # a computed operand
    assert specs(model)["v_mx"] == ("fp4_e2m1", 32, 0, 40)
    x, w = weight(3, 40), weight(40, 40)
    assert set(differences(model, {"x": x, "w": w}).values()) == {0}
