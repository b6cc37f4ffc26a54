import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pt2mx import MXError
from pt2mx.pt2e.onnx.float_graph import FloatGraph, read_float
from tests.onnx_float_files import model_of, weight


def one_product(opset=18, ir_version=10):
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    return model_of([node], {"x": (TensorProto.FLOAT, [3, 40])}, {"y": 2}, {"w": weight(40, 8)}, opset, ir_version)


@pytest.mark.parametrize(("opset", "ir_version"), [(13, 7), (18, 10)])
@pytest.mark.parametrize("of_nodes", [False, True])
def test_the_long_name_of_the_domain(tmp_path, opset, ir_version, of_nodes):
    model = one_product(opset, ir_version)
    model.opset_import[0].domain = "ai.onnx"
    model.graph.node[0].domain = "ai.onnx" * of_nodes
    onnx.save(model, tmp_path / "float.onnx")
    read = read_float(tmp_path / "float.onnx")
    assert [(entry.domain, entry.version) for entry in read.opset_import] == [("", 18)]
    assert [node.domain for node in read.graph.node] == [""]


def unsorted(model):
    model.graph.node.insert(0, helper.make_node("Relu", ["y"], ["z"]))


def short(model):
    model.graph.initializer[0].dims[0] = 41


def of_another_version(model):
    model.ir_version = 99


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (unsorted, "Nodes in a graph must be topologically sorted"),
        (short, "raw_data size .* is too small"),
        (of_another_version, "ir_version 99 is higher"),
    ],
)
def test_models_that_are_not_valid(tmp_path, change, match):
    model = one_product()
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
