import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.quantize_onnx import quantize_onnx
from tests.onnx_float_files import (
    branching_network,
    model_of,
    old_network,
    recurrent_network,
    weight,
    with_dequantized_weights,
)
from tests.onnx_nodes import differences, run

FP4 = MXQuantizationConfig(weight="mxfp4", activation="mxfp8")
WEIGHTS = MXQuantizationConfig(weight="mxfp6_e3m2")


@pytest.fixture(autouse=True)
def _seeded():
    np.random.seed(0)
    torch.manual_seed(0)


def quantized(model, folder, config=FP4, **options):
    """The report, and the quantized model of a float one."""
    onnx.save(model, folder / "float.onnx")
    report = quantize_onnx(folder / "float.onnx", folder / "mx.onnx", config, **options)
    return report, onnx.load(folder / "mx.onnx")


def specs(model):
    """Node of ours -> (element, block size, axis, length)."""
    nodes = [*FakeQuantizeMX.nodes_in(model), *DequantizeMX.nodes_in(model)]
    return {node.output[0]: (a.element, a.block_size, a.axis, a.length) for node, a in nodes}


IMAGES = np.float32(np.random.RandomState(0).randn(2, 3, 8, 8))


@pytest.mark.parametrize(("opset", "ir_version"), [(11, 3), (11, 6), (13, 7), (18, 10)])
def test_files_of_older_opsets(tmp_path, opset, ir_version):
    floats = old_network(opset, ir_version)
    report, model = quantized(floats, tmp_path)
    assert next(entry.version for entry in model.opset_import if entry.domain == "") == 18
    assert [value.name for value in model.graph.input] == ["x"]
    # blocks along what each node reduces: (out, in / groups, ...), transposed (in, out / groups, ...), (out, in), and
    # the transposed constant (in, out)
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


@pytest.mark.parametrize("opset", [11, 18])
def test_weights_alone_give_the_outputs_of_the_dequantized_model(tmp_path, opset):
    floats = old_network(opset, 7)
    _, model = quantized(floats, tmp_path, WEIGHTS)
    assert not list(FakeQuantizeMX.nodes_in(model))
    (got,), (want,) = run(model, IMAGES), run(with_dequantized_weights(floats, model), IMAGES)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    (given,) = run(floats, IMAGES)
    assert 1e-5 < (got - given).abs().max() < 0.1


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
    held = {tensor.name for tensor in model.graph.initializer}
    assert {"table_codes", "table_scale", "lb"} <= held and not {"table", "lw", "gr"} & held
    ids = np.random.randint(0, 70, (5, 3))
    assert set(differences(model, {"ids": ids}).values()) == {0}
    (got,), (want,) = run(model, ids), run(floats, ids)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
    # the embedding and the head are one constant
    assert report.bytes_before == sum(len(t.raw_data) for t in floats.graph.initializer)
    assert report.bytes_after == sum(len(t.raw_data) for t in model.graph.initializer)
    assert [sum(o.bytes_before for o in each.operands) for each in report.operators] == [11200, 38400, 38400, 0]


def test_a_batch_norm_is_folded_before_the_weight_is_quantized(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("BatchNormalization", ["c", "gain", "shift", "mean", "variance"], ["y"], "norm"),
    ]
    held = {"w": weight(8, 40, 3, 3), "gain": 1 + weight(8), "shift": weight(8), "mean": weight(8)}
    held["variance"] = 1 + weight(8) ** 2
    floats = model_of(nodes, {"x": (TensorProto.FLOAT, [None, 40, 5, 5])}, {"y": 4}, held, 11, 6)
    _, model = quantized(floats, tmp_path, MXQuantizationConfig(weight="mxfp8"))
    assert [node.op_type.partition(".")[0] for node in model.graph.node] == ["DequantizeMX", "Conv"]
    assert {tensor.name for tensor in model.graph.initializer} == {"w_codes", "w_scale", "y_bias"}
    factor = held["gain"].astype(np.float64) / np.sqrt(held["variance"].astype(np.float64) + 1e-5)
    folded = (held["w"] * factor[:, None, None, None]).astype(np.float32)
    scale, codes = pt2mx.quantize_mx(torch.from_numpy(folded), "mxfp8", axis=1)
    named = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert np.array_equal(named["w_codes"], codes.numpy()) and np.array_equal(named["w_scale"], scale.numpy())
    x = weight(2, 40, 5, 5)
    assert torch.allclose(run(model, x)[0], run(floats, x)[0], atol=0.1)


def test_gathers_of_something_else_are_no_embeddings(tmp_path):
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "shape"),
        helper.make_node("Gather", ["s", "one"], ["n"], "length", axis=0),
        helper.make_node("Gather", ["x", "one"], ["row"], "row", axis=0),
        helper.make_node("Gather", ["table", "one"], ["column"], "column", axis=1),
        helper.make_node("MatMul", ["x", "table"], ["y"], "product"),
    ]
    floats = model_of(
        nodes, {"x": (TensorProto.FLOAT, [3, 40])}, {"y": 2}, {"table": weight(40, 8), "one": np.array(1)}
    )
    report, _ = quantized(floats, tmp_path)
    assert [(o.name, o.quantized) for o in report.operators] == [("product", True)]


def test_graphs_inside_stay_and_the_report_says_so(tmp_path):
    floats = branching_network()
    report, model = quantized(floats, tmp_path)
    assert {tensor.name for tensor in model.graph.initializer} == {"w", "w_codes", "w_scale"}
    assert [(o.name, o.quantized, o.reason) for o in report.operators] == [
        ("first", True, None),
        ("b_product", False, "inside the sub-graph of choice"),  # else_branch
        ("a_product", False, "inside the sub-graph of choice"),
    ]
    x = weight(3, 40)
    for flag in (True, False):
        assert set(differences(model, {"x": x, "flag": np.array(flag)}).values()) == {0}
        (got,), (want,) = run(model, x, np.array(flag)), run(floats, x, np.array(flag))
        assert torch.allclose(got, want, atol=0.1) and not torch.equal(got, want)


def attention():
    """softmax(q k^T, in two casts) v."""
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
    found = specs(model)
    assert found["fc.bias_mx"] == ("int8", 16, -1, 24) and found["g"] == ("fp8_e4m3", 32, -1, 24)
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


def test_outputs_of_recurrent_layers_are_quantized_where_they_are_read(tmp_path):
    _, model = quantized(recurrent_network(), tmp_path, MXQuantizationConfig(weight="mxfp4", output="mxint8"))
    assert {name: spec for name, spec in specs(model).items() if spec[0] == "int8"} == {
        "e": ("int8", 32, -1, 40),
        "h": ("int8", 32, -1, 20),
        "y": ("int8", 32, -1, 70),
    }
    assert set(differences(model, {"ids": np.random.randint(0, 70, (5, 3))}).values()) == {0}


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision(tmp_path, dtype):
    values = torch.from_numpy(weight(40, 24)).to({10: torch.float16, 16: torch.bfloat16}[dtype])
    held = helper.make_tensor("w", dtype, [40, 24], values.view(torch.int16).numpy().tobytes(), raw=True)
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], "", to=dtype),
        helper.make_node("MatMul", ["h", "w"], ["m"], "product"),
        helper.make_node("Cast", ["m"], ["y"], "", to=TensorProto.FLOAT),
    ]
    floats = model_of(nodes, {"x": (TensorProto.FLOAT, [3, 40])}, {"y": 2}, {"w": held})
    _, model = quantized(floats, tmp_path)
    ((_, attributes),) = DequantizeMX.nodes_in(model)
    assert (attributes.dtype, attributes.axis, attributes.length) == (dtype, 0, 40)
    if dtype == TensorProto.FLOAT16:  # onnxruntime has no product of bfloat16 on the CPU
        assert set(differences(model, {"x": weight(3, 40)}).values()) == {0}
    scale, codes = pt2mx.quantize_mx(values, "mxfp4", axis=0)
    named = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert np.array_equal(named["w_codes"], codes.numpy()) and np.array_equal(named["w_scale"], scale.numpy())


FP8 = MXQuantizationConfig(weight="mxfp8", activation="mxfp8")
NAMES = ["conv1", "ConvTranspose_2", "grouped", "fc", "head"]


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        (lambda q: q.set_module_name("conv1", None), {"conv1": "excluded by module_name 'conv1'"}),
        (lambda q: q.set_module_name("up", None), {"ConvTranspose_2": "excluded by module_name 'up'"}),
        (lambda q: q.set_module_name_regex("conv.|f.*", None), {
            "conv1": "excluded by module_name_regex 'conv.|f.*'", "fc": "excluded by module_name_regex 'conv.|f.*'",
        }),
        (lambda q: q.set_module_type("Conv", None), {
            "conv1": "excluded by module_type 'Conv'", "grouped": "excluded by module_type 'Conv'",
        }),
        (lambda q: q.set_operator_type("aten.matmul", None), {"head": "excluded by operator_type 'aten.matmul'"}),
        (lambda q: q.set_first(None).set_last(None), {"conv1": "excluded by first 1", "head": "excluded by last 1"}),
        (lambda q: q.set_filter_function(lambda node: node.name != "fc"), {"fc": "excluded by the filter function"}),
    ],
)  # fmt: skip
def test_exclusions(tmp_path, settings, left):
    report, model = quantized(old_network(18, 10), tmp_path, settings(MXQuantizer().set_global(FP8)))
    assert {o.name: o.reason for o in report.operators if not o.quantized} == left
    assert [o.name for o in report.operators] == NAMES
    inputs = {name for node in model.graph.node if node.name in left for name in node.input}
    assert not any(name.endswith("_mx") for name in inputs)


def test_settings_of_single_nodes_and_unmatched_ones(tmp_path):
    quantizer = MXQuantizer().set_global(FP8).set_module_name("fc", FP4).set_last(WEIGHTS)
    _, model = quantized(old_network(18, 10), tmp_path, quantizer)
    found = {name: spec[0] for name, spec in specs(model).items()}
    assert found["fc.weight_mx"] == "fp4_e2m1" and found["w2_mx"] == "fp6_e3m2" and "g_mx" not in found
    with pytest.warns(UserWarning, match="module_name 'conv2' matches no operator of the model; did you mean 'conv1'"):
        quantized(old_network(18, 10), tmp_path, MXQuantizer().set_global(FP8).set_module_name("conv2", None))


def test_names_with_slashes(tmp_path):
    nodes = [helper.make_node("MatMul", [a, b], [c], f"/encoder/{c}/MatMul") for a, b, c in ("xwh", "hwy")]
    floats = model_of(nodes, {"x": (TensorProto.FLOAT, [3, 40])}, {"y": 2}, {"w": weight(40, 40)})
    for name in ("encoder.h", "/encoder/h/MatMul", "encoder.h.MatMul"):
        report, _ = quantized(floats, tmp_path, MXQuantizer().set_global(FP8).set_module_name(name, None))
        assert [o.quantized for o in report.operators] == [False, True]


def test_dictionary_of_quark(tmp_path):
    attributes = {"element_dtype": "int8", "axis": 1, "block_size": 16, "rounding_mode": 0}
    _, model = quantized(old_network(18, 10), tmp_path, attributes)
    found = {(a.element, a.block_size, a.rounding) for _, a in FakeQuantizeMX.nodes_in(model)}
    assert found == {("int8_full", 16, "half_away")}
    assert specs(model)["w2_mx"] == ("int8_full", 16, -1, 24)
    assert set(differences(model, {"x": IMAGES}).values()) == {0}


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
    twice = helper.make_function("mine", "Product", ["a", "b"], ["c"], body, [helper.make_opsetid("", 18)])
    nodes = [helper.make_node("Product", ["x", "w"], ["y"], "outer", domain="mine")]
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 8])],
        [numpy_helper.from_array(weight(40, 8), "w")],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    _, model = quantized(helper.make_model(graph, functions=[twice], opset_imports=imports, ir_version=9), tmp_path)
    assert list(specs(model)) == ["x_mx", "w_mx"]


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


def damaged(folder):
    (folder / "float.onnx").write_bytes(b"no model")


def empty(folder):
    (folder / "float.onnx").write_bytes(b"")


def saved(model):
    return lambda folder: onnx.save(model(), folder / "float.onnx")


def doubles():
    nodes = [helper.make_node("MatMul", ["x", "x"], ["h"], "product"), helper.make_node("Cast", ["h"], ["y"], to=1)]
    return model_of(nodes, {"x": (TensorProto.DOUBLE, [8, 8])}, {"y": 2}, {})


def not_finite():
    model = old_network(18, 10)
    bad = np.full((24, 36), np.nan, np.float32)
    model.graph.initializer[4].CopyFrom(numpy_helper.from_array(bad, "fc.weight"))
    return model


def without_products():
    return model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": (TensorProto.FLOAT, [3])}, {"y": 1}, {})


def quantized_already():
    node = FakeQuantizeMX("fp4_e2m1").make(["x"], "y", "mine")
    model = without_products()
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
        (saved(doubles), FP4, "MatMul 'product' computes in float64"),
        (saved(not_finite), FP4, "NaN or Inf in the weights fc.weight"),
        (saved(without_products), FP4, "nothing to quantize in .*: it holds no MatMul"),
        (saved(quantized_already), FP4, "FakeQuantizeMX 'mine' of domain 'pt2mx': the file is quantized already"),
        (saved(unconvertible), FP4, "opset 5 cannot be converted to 18"),
        (saved(lambda: old_network(18, 10)), "mxfp9", "no recipe 'mxfp9'"),
        (saved(lambda: old_network(18, 10)), 4, "config must be an MXQuantizer, an MXQuantizationConfig"),
        (saved(lambda: old_network(18, 10)), {"element_dtype": "fp9"}, "unknown element_dtype 'fp9'"),
        (saved(lambda: old_network(18, 10)), {"elements": "fp8_e4m3"}, "MXAttributes have no 'elements'"),
        (saved(lambda: old_network(18, 10)), MXQuantizationConfig(), "the config names no spec for its operands"),
        (saved(lambda: old_network(18, 10)), MXQuantizationConfig(activation="mxfp8{32}(mse)"), "hold the scale modes"),
        (saved(lambda: old_network(18, 10)), "mxfp4_decoder", "algorithms is not for ONNX files"),
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
    given = tmp_path / "float.onnx"
    with pytest.raises(MXError, match="are one file"):
        quantize_onnx(given, given, FP4)
    with pytest.raises(MXError, match="it must be a file in a folder that exists"):
        quantize_onnx(given, tmp_path / "nowhere" / "mx.onnx", FP4)
    with pytest.raises(MXError, match="batch 1: "):
        quantize_onnx(given, tmp_path / "mx.onnx", FP4, [{"x": IMAGES}, {"z": IMAGES}])
    for batches, match in (
        ({"x": IMAGES}, "calibration must be a list of batches by name, not of type dict"),
        (3, "calibration must be a list of batches by name, not of type int"),
        ([IMAGES], "batch 0 must be a mapping of inputs by name, not of type ndarray"),
    ):
        with pytest.raises(MXError, match=match):
            quantize_onnx(given, tmp_path / "mx.onnx", FP4, batches)
    assert not (tmp_path / "mx.onnx").exists()
    onnx.save(not_finite(), given)
    quantize_onnx(given, tmp_path / "mx.onnx", WEIGHTS, allow_nan=True)
    assert run(str(tmp_path / "mx.onnx"), IMAGES)[0].shape == (2, 40)
