import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pt2mx import MXError, MXQuantizationConfig, quantize_onnx
from pt2mx.pt2e.onnx.quantize.graph import FloatGraph
from pt2mx.pt2e.onnx.quantize.plan import plan, quantizer_of
from tests.onnx_float_files import model_of, weight
from tests.onnx_nodes import differences

CONFIG = MXQuantizationConfig(weight="mxfp4", activation="mxfp8")
X = {"x": (TensorProto.FLOAT, [3, 40])}


def matmul(a, b, y):
    return helper.make_node("MatMul", [a, b], [y], f"{y}_matmul")


def planned(model):
    """Return output of a node -> (its quantized tensors, the reasons for the others, the remark)."""
    plans = plan(FloatGraph(model), quantizer_of(CONFIG))
    return {p.node.output[0]: ([o.tensor for o in p.operands], p.reasons, p.remark) for p in plans}


def test_a_factor_of_unknown_rank_stays_if_its_axis_counts_from_the_end():
    nodes = [helper.make_node("Reshape", ["a", "shape"], ["r"]), matmul("r", "r", "y")]
    inputs = {"a": (TensorProto.FLOAT, [1600]), "shape": (TensorProto.INT64, [None])}
    assert planned(model_of(nodes, inputs, {"y": 2}, {})) == {"y": (["r"], ("r has an unknown rank",), None)}


def test_types_after_operators_of_other_domains_are_those_of_the_other_operand(tmp_path):
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["h"], "fused", domain="com.microsoft"),
        matmul("h", "w", "g"),
        helper.make_node("FusedMatMul", ["g", "w"], ["f"], "again", domain="com.microsoft"),
        matmul("f", "f", "y"),
    ]
    model = model_of(nodes[1:2], {"h": X["x"]}, {"g": 2}, {"w": weight(40, 40)})
    del model.graph.node[:], model.graph.input[:], model.graph.output[:]
    model.graph.node.extend(nodes)
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [40, 40]))
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [40, 40]))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert planned(model) == {"g": (["h", "w"], (), None), "y": ([], ("f has an unknown type",), None)}
    onnx.save(model, tmp_path / "float.onnx")
    quantize_onnx(tmp_path / "float.onnx", tmp_path / "mx.onnx", CONFIG)
    assert set(differences(onnx.load(tmp_path / "mx.onnx"), {"x": weight(40, 40)}).values()) == {0}


def quantized_to_integers():
    """Return matmuls of a dequantized weight, and of a dequantized activation with the weight transposed."""
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"]),
        matmul("x", "w", "h"),
        helper.make_node("QuantizeLinear", ["h", "scale"], ["h8"]),
        helper.make_node("DequantizeLinear", ["h8", "scale"], ["hd"]),
        helper.make_node("Transpose", ["w"], ["wt"]),
        matmul("hd", "wt", "y"),
    ]
    constants = {"codes": np.random.randint(0, 255, (40, 40)).astype(np.uint8), "scale": np.float32(0.01)}
    return model_of(nodes, X, {"y": 2}, constants)


def test_tensors_that_are_quantized_already_stay(tmp_path):
    reason = "{} is quantized already, before a DequantizeLinear"
    model = quantized_to_integers()
    assert planned(model) == {
        "h": (["x"], (reason.format("w"),), None),
        "y": ([], (reason.format("hd"), reason.format("wt")), None),
    }
    onnx.save(model, tmp_path / "float.onnx")
    weights = MXQuantizationConfig(weight="mxfp4")
    with pytest.raises(MXError, match=r"nothing to quantize in .*: the config names no spec for its operands"):
        quantize_onnx(tmp_path / "float.onnx", tmp_path / "mx.onnx", weights)
    assert not (tmp_path / "mx.onnx").exists()


def test_a_default_of_an_input_gets_a_remark():
    model = model_of([matmul("x", "w", "y")], X | {"w": (TensorProto.FLOAT, [40, 40])}, {"y": 2}, {"w": weight(40, 40)})
    remark = "w is a default of an input, no constant: it is quantized at each call"
    assert planned(model) == {"y": (["x", "w"], (), remark)}


def test_a_model_with_matmuls_only_in_a_loop(tmp_path):
    kinds = {"i": (TensorProto.INT64, []), "c": (TensorProto.BOOL, []), "s": (TensorProto.FLOAT, [3, 40])}
    values = [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()]
    results = [helper.make_tensor_value_info(name, *kinds[name[0]]) for name in ("c2", "s2")]
    body = [helper.make_node("Identity", ["c"], ["c2"]), matmul("s", "w", "s2")]
    body = helper.make_graph(body, "body", values, results)
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], "loop", body=body)
    onnx.save(model_of([loop], X, {"y": 2}, {"w": weight(40, 40), "n": np.array(3)}), tmp_path / "float.onnx")
    with pytest.raises(MXError, match=r"nothing to quantize in .*: inside the sub-graph of loop$"):
        quantize_onnx(tmp_path / "float.onnx", tmp_path / "mx.onnx", CONFIG)
