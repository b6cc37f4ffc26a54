"""Quark's nodes with functions: compared with pt2mx's operators, and with the recorded results of Quark's kernels."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from pt2mx import FORMATS, MXError, onnx_functions, quark
from tests.compare import same
from tests.golden import ENTRIES, GOLDEN
from tests.onnx_float_files import weight
from tests.onnx_nodes import run
from tests.random_values import random_values

OF_QUARK = [entry for entry in ENTRIES if entry["lib"] == "quark"]
NAMES = [("MXQuantizeDequantize", "com.amd.quark"), ("MXFixNeuron", "com.vai.quantize")]


def file_of(nodes, shape, path, opset=18, constants=(), dtype=TensorProto.FLOAT):
    """Write a file of nodes from x to y as Quark does: without functions."""
    values = [helper.make_tensor_value_info(name, dtype, shape) for name in "xy"]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], list(constants))
    domains = dict.fromkeys(node.domain for node in nodes if node.domain)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def quark_node(x, y, name="MXQuantizeDequantize", domain="com.amd.quark", **attributes):
    return helper.make_node(name, [x], [y], f"{y}_node", domain=domain, **attributes)


def with_inputs(*names):
    return helper.make_node("MXQuantizeDequantize", names, ["y"], "y_node", domain="com.amd.quark")


def outputs(path, *inputs):
    return run(str(path), *inputs)


@pytest.mark.compiled_cases("fp8_e5m2-*", "fp6_e2m3-*")
@pytest.mark.parametrize("entry", OF_QUARK, ids=lambda e: f"{e['fmt']}-{e['input']}-{e['rounding_mode']}")
def test_recorded_results_of_quark(tmp_path, entry):
    x = torch.from_numpy(GOLDEN["in/" + entry["input"]])
    attributes = {"element_dtype": entry["fmt"], "axis": entry["axis"], "block_size": entry["block"]}
    attributes["rounding_mode"] = entry["rounding_mode"]
    path = file_of([quark_node("x", "y", *NAMES[x.dim() % 2], **attributes)], x.shape, tmp_path / "net.onnx")
    assert onnx_functions(path) == 1
    (y,) = outputs(path, x)
    assert same(y, quark.mx_quantize_dequantize(x, attributes))
    if entry["expect"] == "exact":
        assert np.array_equal(y.numpy(), GOLDEN[entry["dq"]], equal_nan=True)


@pytest.mark.diagonal
@pytest.mark.parametrize("rounding_mode", [0, 1, 2])
@pytest.mark.parametrize("element", FORMATS)
def test_adversarial_values(tmp_path, element, rounding_mode):
    torch.manual_seed(0)
    attributes = {"element_dtype": element, "axis": -1, "block_size": 16, "rounding_mode": rounding_mode}
    path = file_of([quark_node("x", "y", **attributes)], [None, 40], tmp_path / "net.onnx")
    onnx_functions(path)
    x = torch.cat([random_values((500, 40), torch.float32, kind) for kind in range(5)])  # 100,000 values
    assert same(outputs(path, x)[0], quark.mx_quantize_dequantize(x, attributes))


@pytest.mark.parametrize("opset", [13, 17, 18, 21])
def test_default_attributes(tmp_path, opset):
    """They are int8, blocks of 32 along dimension 1, ties away from zero; a vector has its blocks along dimension 0."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["s"], "", keepdims=0),  # a vector
        quark_node("s", "v"),
        quark_node("x", "q"),
        helper.make_node("Add", ["q", "v"], ["y"]),
    ]
    axes = numpy_helper.from_array(np.array([0, 1]), "axes")
    path = file_of(nodes, [3, 40, 50], tmp_path / "net.onnx", opset, [axes])
    assert onnx_functions(path, tmp_path / "out.onnx") == 2
    x = torch.from_numpy(weight(3, 40, 50))
    (y,) = outputs(tmp_path / "out.onnx", x)
    vector = quark.mx_quantize_dequantize(x.sum((0, 1)), {})
    assert torch.allclose(y, quark.mx_quantize_dequantize(x, {}) + vector, atol=0.02)
    model = onnx.load(tmp_path / "out.onnx")
    assert sorted((f.domain, f.name, f.overload) for f in model.functions) == [
        ("com.amd.quark", "MXQuantizeDequantize", ""),
        ("com.amd.quark", "MXQuantizeDequantize", "int8_full_floor_half_away_b32_any_axis1"),
    ]


def test_only_the_overload_of_nodes_changes(tmp_path):
    nodes = [
        quark_node("x", "a", element_dtype="fp4_e2m1", rounding_mode=2),
        quark_node("a", "b", element_dtype="fp8_e4m3", axis=0),
        quark_node("b", "c", element_dtype="fp4_e2m1", rounding_mode=2),
        quark_node("c", "y", *NAMES[1], element_dtype="fp6_e2m3", axis=-2, block_size=8),
    ]
    path = file_of(nodes, [None, 40], tmp_path / "net.onnx")
    original = onnx.load(path)
    assert onnx_functions(path) == 4
    model = onnx.load(path)
    assert [node.overload for node in model.graph.node] == ["", "fp8_e4m3_floor_even_b32_any_axis0", "", ""]
    for node, before in zip(model.graph.node, original.graph.node, strict=True):
        node.ClearField("overload")
        assert node == before
    x = torch.from_numpy(weight(7, 40))
    want = x
    for node in nodes:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        want = quark.mx_quantize_dequantize(want, attributes | {"element_dtype": attributes["element_dtype"].decode()})
    assert same(outputs(path, x)[0], want)
    # a second time
    once = path.read_bytes()
    assert onnx_functions(path) == 4 and path.read_bytes() == once


def test_nodes_in_a_branch(tmp_path):
    def branch(name, element):
        nodes = [quark_node("x", name, element_dtype=element)]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 40])])

    choice = helper.make_node(
        "If", ["flag"], ["y"], "", then_branch=branch("a", "fp4_e2m1"), else_branch=branch("b", "fp8_e5m2")
    )
    flag = numpy_helper.from_array(np.array(True), "flag")
    path = file_of([quark_node("x", "other"), choice], [2, 40], tmp_path / "net.onnx", constants=[flag])
    assert onnx_functions(path) == 3
    x = torch.from_numpy(weight(2, 40))
    assert same(outputs(path, x)[0], quark.mx_quantize_dequantize(x, {"element_dtype": "fp4_e2m1"}))


def test_half_precision(tmp_path):
    path = file_of([quark_node("x", "y")], [2, 40], tmp_path / "net.onnx", dtype=TensorProto.FLOAT16)
    onnx_functions(path)
    x = torch.from_numpy(weight(2, 40)).half()
    assert same(outputs(path, x)[0], quark.mx_quantize_dequantize(x, {}))


@pytest.mark.parametrize(
    ("node", "match"),
    [
        (helper.make_node("Relu", ["x"], ["y"]), "holds no MX node of Quark: MXQuantizeDequantize, MXFixNeuron"),
        (quark_node("x", "y", element_dtype="fp9"), "MXQuantizeDequantize 'y_node': unknown element_dtype 'fp9'"),
        (quark_node("x", "y", rounding_mode=3), "'y_node': quark has no rounding_mode 3"),
        (quark_node("x", "y", axes=1), "'y_node': MXAttributes have no 'axes'"),
        (quark_node("x", "y", axis=2), "'y_node': axis=2 is out of range for a tensor of rank 2"),
        (quark_node("x", "y", block_size=0), "'y_node': block_size=0 must be"),
        (with_inputs("x", "x"), "MXQuantizeDequantize 'y_node' has 2 inputs, and Quark's operator one"),
        (with_inputs(), "the types of the model's tensors cannot be inferred: "),
    ],
)
def test_errors_do_not_change_the_file(tmp_path, node, match):
    path = file_of([node], [2, 40], tmp_path / "net.onnx")
    before = path.read_bytes()
    with pytest.raises(MXError, match=match):
        onnx_functions(path)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["net.onnx"]


def test_other_nodes_of_quark_are_refused(tmp_path):
    nodes = [quark_node("x", "h"), quark_node("h", "y", "BFPQuantizeDequantize")]
    path = file_of(nodes, [2, 40], tmp_path / "net.onnx")
    with pytest.raises(MXError, match="BFPQuantizeDequantize 'y_node' is no MX node"):
        onnx_functions(path)
    with pytest.raises(MXError, match="is no ONNX file that can be read"):
        onnx_functions(tmp_path / "missing.onnx", tmp_path / "out.onnx")
