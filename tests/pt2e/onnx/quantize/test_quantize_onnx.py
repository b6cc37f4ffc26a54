import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import pt2mx
from pt2mx import MXError, MXQuantizationConfig
from pt2mx.pt2e.onnx.export import DIALECTS
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.quantize.quantize_onnx import quantize_onnx
from tests.onnx_float_files import (
    branching_network,
    model_of,
    old_network,
    recurrent_network,
    weight,
    with_dequantized_weights,
)
from tests.onnx_nodes import differences, run
from tests.onnx_quantized_files import FP4, IMAGES, WEIGHTS, quantized, specs


@pytest.mark.parametrize(("opset", "ir_version"), [(11, 3), (11, 6), (13, 7), (18, 10)])
def test_files_of_older_opsets(tmp_path, opset, ir_version):
    floats = old_network(opset, ir_version)
    report, model = quantized(floats, tmp_path)
    assert next(entry.version for entry in model.opset_import if entry.domain == "") == 18
    assert [value.name for value in model.graph.input] == ["x"]
    # blocks along the dimension that each node reduces: (out, in / groups, ...), transposed (in, out / groups, ...),
    # (out, in), and the transposed constant (in, out)
    assert specs(model) == {
        "x_mx": ("fp8_e4m3", 32, 1, 3),
        "conv1.weight_mx": ("fp4_e2m1", 32, 1, 3),
        "r1_mx": ("fp8_e4m3", 32, 1, 48),
        "up.weight_mx": ("fp4_e2m1", 32, 0, 48),
        "c2_mx": ("fp8_e4m3", 32, 1, 40),
        "grouped.weight_mx": ("fp4_e2m1", 32, 1, 20),
        "f_mx": ("fp8_e4m3", 32, -1, 36),
        "fc.weight_mx": ("fp4_e2m1", 32, -1, 36),
        "g_mx": ("fp8_e4m3", 32, -1, 24),
        "w2_mx": ("fp4_e2m1", 32, -1, 24),
    }
    assert differences(model, {"x": IMAGES}) == dict.fromkeys((f"{name}_node" for name in specs(model)), 0)
    assert [operator.module for operator in report.operators][::3] == ["conv1", "fc"]


def test_blocks_of_a_depthwise_convolution_run_along_taps(tmp_path):
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv", group=40)]
    floats = model_of(nodes, {"x": (TensorProto.FLOAT, [2, 40, 9, 9])}, {"y": 4}, {"w": weight(40, 1, 3, 3)})
    _, model = quantized(floats, tmp_path)
    assert specs(model) == {"x_mx": ("fp8_e4m3", 32, 1, 40), "w_mx": ("fp4_e2m1", 32, -1, 3)}


@pytest.mark.parametrize("opset", [11, 18])
def test_weight_only_gives_the_outputs_of_the_dequantized_model(tmp_path, opset):
    floats = old_network(opset, 7)
    _, model = quantized(floats, tmp_path, WEIGHTS)
    assert not list(FakeQuantizeMX.nodes_in(model))
    (got,), (want,) = run(model, IMAGES), run(with_dequantized_weights(floats, model), IMAGES)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    (float_output,) = run(floats, IMAGES)
    assert 1e-5 < (got - float_output).abs().max() < 0.1


def test_recurrent_layers_and_embeddings(tmp_path):
    floats = recurrent_network()
    report, model = quantized(floats, tmp_path, MXQuantizationConfig(weight="mxfp8", activation="mxint8"))
    assert specs(model) == {
        "e_mx": ("int8", 32, -1, 40),
        "lw_mx": ("fp8_e4m3", 32, -1, 40),
        "lr_mx": ("fp8_e4m3", 32, -1, 20),
        "s_mx": ("int8", 32, -1, 40),
        "gw_mx": ("fp8_e4m3", 32, -1, 40),
        "gr_mx": ("fp8_e4m3", 32, -1, 40),
        "l_mx": ("int8", 32, -1, 40),
        "e": ("fp8_e4m3", 32, -1, 40),
        "table_mx": ("fp8_e4m3", 32, -1, 40),
    }
    initializers = {tensor.name for tensor in model.graph.initializer}
    assert {"table_codes", "table_scale", "lb"} <= initializers and not {"table", "lw", "gr"} & initializers
    ids = np.random.randint(0, 70, (5, 3))
    assert set(differences(model, {"ids": ids}).values()) == {0}
    (got,), (want,) = run(model, ids), run(floats, ids)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
    # the embedding and the head are one constant
    assert report.bytes_before == sum(len(t.raw_data) for t in floats.graph.initializer)
    assert report.bytes_after == sum(len(t.raw_data) for t in model.graph.initializer)
    assert [sum(o.bytes_before for o in each.operands) for each in report.operators] == [11200, 38400, 38400, 0]


@pytest.mark.parametrize("target", DIALECTS)
def test_every_target(target, tmp_path):
    """Of opset 18, which some targets raise."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "linear")]
    floats = model_of(nodes, {"x": (TensorProto.FLOAT, [2, 64])}, {"y": 2}, {"w": weight(64, 32)})
    spec = "mxfp8(rceil)" if target == "tensorrt" else "mxfp8"
    _, model = quantized(floats, tmp_path, MXQuantizationConfig(weight=spec, activation=spec), target=target)
    onnx.checker.check_model(model, full_check=True)
    x = np.random.randn(2, 64).astype(np.float32)
    if target not in ("standard", "tensorrt"):  # onnxruntime lacks their operators
        torch.testing.assert_close(run(model, x)[0], run(floats, x)[0], rtol=0.1, atol=0.1)


def test_nvfp4(tmp_path):
    config = MXQuantizationConfig(weight="nvfp4", activation="nvfp4")
    floats = recurrent_network()
    report, model = quantized(floats, tmp_path, config)
    ids = np.random.randint(0, 70, (5, 3))
    assert len(specs(model)) == 9 and set(differences(model, {"ids": ids}).values()) == {0}
    assert {"table_codes", "table_scale", "table_tensor_scale"} <= {t.name for t in model.graph.initializer}
    assert report.bytes_after == sum(len(t.raw_data) for t in model.graph.initializer)
    with pytest.raises(MXError, match="has blocks of several rows, and an embedding reads single rows"):
        quantized(floats, tmp_path, MXQuantizationConfig(weight="fp8_e4m3{16x32}(f32)"))


def test_a_batch_norm_is_folded_before_the_weight_is_quantized(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("BatchNormalization", ["c", "gain", "shift", "mean", "variance"], ["y"], "norm"),
    ]
    constants = {"w": weight(8, 40, 3, 3), "gain": 1 + weight(8), "shift": weight(8), "mean": weight(8)}
    constants["variance"] = 1 + weight(8) ** 2
    floats = model_of(nodes, {"x": (TensorProto.FLOAT, [None, 40, 5, 5])}, {"y": 4}, constants, 11, 6)
    _, model = quantized(floats, tmp_path, MXQuantizationConfig(weight="mxfp8"))
    assert [node.op_type.partition(".")[0] for node in model.graph.node] == ["DequantizeMX", "Conv"]
    assert {tensor.name for tensor in model.graph.initializer} == {"w_codes", "w_scale", "y_bias"}
    factor = constants["gain"].astype(np.float64) / np.sqrt(constants["variance"].astype(np.float64) + 1e-5)
    folded = (constants["w"] * factor[:, None, None, None]).astype(np.float32)
    scale, codes = pt2mx.quantize_mx(torch.from_numpy(folded), "mxfp8", axis=1)
    named = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert np.array_equal(named["w_codes"], codes.numpy()) and np.array_equal(named["w_scale"], scale.numpy())
    x = weight(2, 40, 5, 5)
    assert torch.allclose(run(model, x)[0], run(floats, x)[0], atol=0.1)


def test_subgraphs_stay_and_the_report_says_so(tmp_path):
    floats = branching_network()
    report, model = quantized(floats, tmp_path)
    assert {tensor.name for tensor in model.graph.initializer} == {"w", "w_codes", "w_scale"}
    assert [(o.name, o.quantized, o.reason) for o in report.operators] == [
        ("first", True, None),
        ("b_matmul", False, "inside the sub-graph of choice"),  # else_branch
        ("a_matmul", False, "inside the sub-graph of choice"),
    ]
    x = weight(3, 40)
    for flag in (True, False):
        assert set(differences(model, {"x": x, "flag": np.array(flag)}).values()) == {0}
        (got,), (want,) = run(model, x, np.array(flag)), run(floats, x, np.array(flag))
        assert torch.allclose(got, want, atol=0.1) and not torch.equal(got, want)


def test_a_matmul_in_nested_subgraphs_is_reported_once(tmp_path):
    floats = branching_network()
    choice = floats.graph.node.pop()
    choice.output[0] = "chosen"
    result = helper.make_tensor_value_info("chosen", TensorProto.FLOAT, [None] * 2)
    branch = helper.make_graph([choice], "branch", [], [result])
    same = helper.make_graph([helper.make_node("Identity", ["h"], ["chosen"])], "same", [], [result])
    floats.graph.node.append(helper.make_node("If", ["flag"], ["y"], "outer", then_branch=branch, else_branch=same))
    report, _ = quantized(floats, tmp_path)
    assert [(o.name, o.reason) for o in report.operators] == [
        ("first", None),
        ("b_matmul", "inside the sub-graph of outer"),
        ("a_matmul", "inside the sub-graph of outer"),
    ]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision(tmp_path, dtype):
    values = torch.from_numpy(weight(40, 24)).to({10: torch.float16, 16: torch.bfloat16}[dtype])
    constant = helper.make_tensor("w", dtype, [40, 24], values.view(torch.int16).numpy().tobytes(), raw=True)
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], "", to=dtype),
        helper.make_node("MatMul", ["h", "w"], ["m"], "matmul"),
        helper.make_node("Cast", ["m"], ["y"], "", to=TensorProto.FLOAT),
    ]
    floats = model_of(nodes, {"x": (TensorProto.FLOAT, [3, 40])}, {"y": 2}, {"w": constant})
    _, model = quantized(floats, tmp_path)
    ((_, attributes),) = DequantizeMX.nodes_in(model)
    assert (attributes.dtype, attributes.spec.axis, attributes.length) == (dtype, 0, 40)
    if dtype == TensorProto.FLOAT16:  # onnxruntime has no bfloat16 matmul on the CPU
        assert set(differences(model, {"x": weight(3, 40)}).values()) == {0}
    scale, codes = pt2mx.quantize_mx(values, "mxfp4", axis=0)
    named = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert np.array_equal(named["w_codes"], codes.numpy()) and np.array_equal(named["w_scale"], scale.numpy())


def test_calibration_compares_the_outputs(tmp_path):
    floats = old_network(18, 10)
    batches = ({"x": torch.from_numpy(IMAGES + i)} for i in range(3))
    report, _ = quantized(floats, tmp_path, "mxfp8", calibration=batches)
    (want,) = run(floats, IMAGES)
    assert report.fidelity.values == 3 * want.numel() and report.fidelity.cosine > 0.999
    assert '"fidelity"' in report.to_json()
    assert quantized(floats, tmp_path, "mxfp8")[0].fidelity is None


def test_external_data_and_functions_of_the_model(tmp_path):
    floats = old_network(18, 10)
    onnx.save(floats, tmp_path / "external.onnx", save_as_external_data=True, location="data", size_threshold=0)
    quantize_onnx(tmp_path / "external.onnx", tmp_path / "mx.onnx", FP4)
    _, model = quantized(floats, tmp_path)
    assert onnx.load(tmp_path / "mx.onnx") == model

    body = [helper.make_node("MatMul", ["a", "b"], ["c"], "inner")]
    function = helper.make_function("mine", "Multiply", ["a", "b"], ["c"], body, [helper.make_opsetid("", 18)])
    nodes = [helper.make_node("Multiply", ["x", "w"], ["y"], "outer", domain="mine")]
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 8])],
        [numpy_helper.from_array(weight(40, 8), "w")],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    _, model = quantized(helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=9), tmp_path)
    assert list(specs(model)) == ["x_mx", "w_mx"]
