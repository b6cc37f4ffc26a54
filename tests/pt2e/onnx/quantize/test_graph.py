"""Prepare a float file for quantization, and find the sources of its tensors."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from pt2mx import MXError
from pt2mx.pt2e.onnx.quantize.graph import FloatGraph, fold_batch_norms, hoist_constants, read_float
from tests.onnx_float_files import model_of, weight
from tests.onnx_nodes import run

NORM = ("gain", "shift", "mean", "variance")


def one_matmul(opset=18, ir_version=10):
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")
    return model_of([node], {"x": (TensorProto.FLOAT, [3, 40])}, {"y": 2}, {"w": weight(40, 8)}, opset, ir_version)


@pytest.mark.parametrize(("opset", "ir_version"), [(13, 7), (18, 10)])
@pytest.mark.parametrize("in_nodes", [False, True])
def test_the_long_name_of_the_domain(tmp_path, opset, ir_version, in_nodes):
    model = one_matmul(opset, ir_version)
    model.opset_import[0].domain = "ai.onnx"
    model.graph.node[0].domain = "ai.onnx" * in_nodes
    onnx.save(model, tmp_path / "float.onnx")
    read = read_float(tmp_path / "float.onnx")
    assert [(entry.domain, entry.version) for entry in read.opset_import] == [("", 18)]
    assert [node.domain for node in read.graph.node] == [""]


def unsorted(model):
    model.graph.node.insert(0, helper.make_node("Relu", ["y"], ["z"]))


def short(model):
    model.graph.initializer[0].dims[0] = 41


def unknown_version(model):
    model.ir_version = 99


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (unsorted, "Nodes in a graph must be topologically sorted"),
        (short, "raw_data size .* is too small"),
        (unknown_version, "ir_version 99 is higher"),
    ],
)
def test_models_that_are_not_valid(tmp_path, change, match):
    model = one_matmul()
    change(model)
    onnx.save(model, tmp_path / "float.onnx")
    with pytest.raises(MXError, match=f"the float model is not valid: .*{match}"):
        read_float(tmp_path / "float.onnx")


def test_sources_and_their_axes():
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], "", perm=[2, 0, 1]),
        helper.make_node("Identity", ["t"], ["i"]),
        helper.make_node("MatMul", ["x", "i"], ["y"]),
    ]
    inputs = {"x": (TensorProto.FLOAT, [3, 40]), "v": (TensorProto.FLOAT, [2])}
    graph = FloatGraph(model_of(nodes, inputs, {"y": 3}, {"w": weight(40, 8, 5), "v": np.float32([1, 2])}))
    source = graph.source("i")
    assert source is not None and source.constant.name == "w" and [n.op_type for n in source.chain] == [
        "Transpose", "Identity",
    ]  # fmt: skip
    assert [source.axis(axis) for axis in (0, 1, -1)] == [2, 0, 1]
    assert graph.source("x") is None and graph.source("v") is None
    assert list(graph.constants) == ["w"] and list(graph.defaults) == ["v"]


def constants_of(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value": numpy_helper.from_array(np.float32([[1, 2]]))}, np.float32([[1, 2]])),
        ({"value_float": 2.0}, np.float32(2)),
        ({"value_floats": [1.0, 2.0]}, np.float32([1, 2])),
        ({"value_int": 3}, np.int64(3)),
        ({"value_ints": [3, 4]}, np.int64([3, 4])),
    ],
)
def test_constant_nodes(attribute, expected):
    nodes = [
        helper.make_node("Constant", [], ["c"], **attribute),
        helper.make_node("Cast", ["c"], ["f"], to=TensorProto.DOUBLE),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [1])}, {"y": 1}, {})
    hoist_constants(model)
    assert [node.op_type for node in model.graph.node] == ["Identity"]
    constant = constants_of(model)["c"]
    assert constant.dtype == expected.dtype and np.array_equal(constant, expected)


@pytest.mark.parametrize(
    "nodes",
    [
        [  # text, and what is computed of an input
            helper.make_node("Constant", [], ["t"], value_string="text"),
            helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
        ],
        [  # without a value
            helper.make_node("Reshape", ["flat", "shape"], ["y"]),
            helper.make_node("Constant", [], ["nothing"]),
        ],
    ],
)
def test_nodes_that_are_no_constant_tensors_stay(nodes):
    constants = {"flat": weight(30), "shape": np.array([4, 4])}
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [1])}, {"y": 1}, constants)
    before = model.SerializeToString()
    hoist_constants(model)
    assert model.SerializeToString() == before


def test_casts_and_shapes_of_constants_are_constants():
    """Weights in half precision with a cast, and a flat weight with a reshape."""
    nodes = [
        helper.make_node("Cast", ["half"], ["w"], "", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("Unsqueeze", ["n", "zero"], ["u"]),
        helper.make_node("Concat", ["u", "m"], ["shape"], axis=0),
        helper.make_node("Reshape", ["flat", "shape"], ["v"]),
        helper.make_node("Transpose", ["v"], ["t"]),
        helper.make_node("MatMul", ["h", "t"], ["y"], "second"),
    ]
    constants = {"half": weight(8, 6).astype(np.float16), "flat": weight(30), "n": np.array(5), "m": np.array([6])}
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [2, 8])}, {"y": 2}, constants | {"zero": np.array([0])})
    x = torch.from_numpy(weight(2, 8))
    (expected,) = run(model, x)
    hoist_constants(model)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Transpose", "MatMul"]
    assert constants_of(model)["v"].shape == (5, 6)
    assert torch.equal(run(model, x)[0], expected)


def network(conv, norm=(), constants=(), **attributes):
    """A convolution, a batch norm and a ReLU."""
    np.random.seed(0)
    nodes = [
        helper.make_node(conv, ["x", "w", *(["b"] if "b" in dict(constants) else [])], ["c"], "conv", **attributes),
        helper.make_node("BatchNormalization", ["c", *NORM], ["n"], "norm", epsilon=1e-3, **dict(norm)),
        helper.make_node("Relu", ["n"], ["y"], "relu"),
    ]
    parameters = {"w": weight(8, 6, 3, 3) if conv == "Conv" else weight(6, 8, 3, 3)}
    parameters |= {"gain": weight(8) + 1, "shift": weight(8), "mean": weight(8), "variance": weight(8) ** 2 + 0.1}
    return model_of(nodes, {"x": (TensorProto.FLOAT, [None, 6, 9, 9])}, {"y": 4}, parameters | dict(constants))


@pytest.mark.parametrize("conv", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("constants", [{}, {"b": np.float32(np.arange(8))}])
def test_a_batch_norm_is_folded(conv, constants):
    model = network(conv, constants=constants)
    x = torch.from_numpy(weight(2, 6, 9, 9))
    (expected,) = run(model, x)
    fold_batch_norms(model)
    onnx.checker.check_model(model, full_check=True)
    assert [(node.name, *node.output) for node in model.graph.node] == [("conv", "n"), ("relu", "y")]
    assert torch.allclose(run(model, x)[0], expected, atol=1e-5)


def test_batch_norms_in_a_row_and_half_precision():
    parameters = {"w": weight(8, 8, 1, 1).astype(np.float16)}
    parameters |= {name: np.float16(weight(8) + 1) for name in NORM}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv")]
    nodes += [helper.make_node("BatchNormalization", [i, *NORM], [o], o) for i, o in ("cn", "ny")]
    model = model_of(nodes, {"x": (TensorProto.FLOAT16, [1, 8, 2, 2])}, {"y": 4}, parameters)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    x = torch.from_numpy(weight(1, 8, 2, 2)).half()
    (expected,) = run(model, x)
    fold_batch_norms(model)
    assert [node.op_type for node in model.graph.node] == ["Conv"]
    assert torch.allclose(run(model, x)[0], expected, atol=0.02)


def second_user(model):
    model.graph.node.append(helper.make_node("Neg", ["c"], ["also"]))


def shared_weight(model):
    model.graph.node.append(helper.make_node("Neg", ["w"], ["also"]))


def computed_gain(model):
    model.graph.node.insert(0, helper.make_node("Neg", ["shift"], ["negative"]))
    model.graph.node[2].input[1] = "negative"


def default_of_an_input(model):
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [8, 6, 3, 3]))


def output(model):
    model.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, [None] * 4))


@pytest.mark.parametrize("change", [second_user, shared_weight, computed_gain, default_of_an_input, output])
def test_batch_norms_that_cannot_be_folded_stay(change):
    model = network("Conv")
    change(model)
    before = model.SerializeToString()
    fold_batch_norms(model)
    assert model.SerializeToString() == before


def test_groups_of_a_transposed_convolution_stay():
    model = network("ConvTranspose", group=2)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight(6, 4, 3, 3), "w"))
    fold_batch_norms(model)
    assert [node.op_type for node in model.graph.node] == ["ConvTranspose", "BatchNormalization", "Relu"]


def test_the_bias_has_a_fresh_name():
    model = network("Conv", constants={"n_bias": weight(8)})
    model.graph.node.append(helper.make_node("Neg", ["n_bias"], ["also"]))
    fold_batch_norms(model)
    onnx.checker.check_model(model)
    assert list(model.graph.node[0].input) == ["x", "w", "n_bias_1"]
