import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from pt2mx.pt2e.onnx.float_constants import hoist_constants
from tests.onnx_float_files import model_of, weight
from tests.onnx_nodes import run


def constants_of(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize(
    ("attribute", "want"),
    [
        ({"value": numpy_helper.from_array(np.float32([[1, 2]]))}, np.float32([[1, 2]])),
        ({"value_float": 2.0}, np.float32(2)),
        ({"value_floats": [1.0, 2.0]}, np.float32([1, 2])),
        ({"value_int": 3}, np.int64(3)),
        ({"value_ints": [3, 4]}, np.int64([3, 4])),
    ],
)
def test_constant_nodes(attribute, want):
    nodes = [
        helper.make_node("Constant", [], ["c"], **attribute),
        helper.make_node("Cast", ["c"], ["f"], to=TensorProto.DOUBLE),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [1])}, {"y": 1}, {})
    hoist_constants(model)
    assert [node.op_type for node in model.graph.node] == ["Identity"]
    found = constants_of(model)["c"]
    assert found.dtype == want.dtype and np.array_equal(found, want)


def test_text_and_what_is_computed_stay():
    nodes = [
        helper.make_node("Constant", [], ["t"], value_string="text"),
        helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [1])}, {"y": 1}, {})
    before = model.SerializeToString()
    hoist_constants(model)
    assert model.SerializeToString() == before


def test_casts_and_shapes_of_constants_are_constants():
    """Weights in half precision that are cast, and a flat one that is given its shape."""
    nodes = [
        helper.make_node("Cast", ["half"], ["w"], "", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("Unsqueeze", ["n", "zero"], ["u"]),
        helper.make_node("Concat", ["u", "m"], ["shape"], axis=0),
        helper.make_node("Reshape", ["flat", "shape"], ["v"]),
        helper.make_node("Transpose", ["v"], ["t"]),
        helper.make_node("MatMul", ["h", "t"], ["y"], "second"),
    ]
    held = {"half": weight(8, 6).astype(np.float16), "flat": weight(30), "n": np.array(5), "m": np.array([6])}
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [2, 8])}, {"y": 2}, held | {"zero": np.array([0])})
    x = torch.from_numpy(weight(2, 8))
    (want,) = run(model, x)
    hoist_constants(model)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Transpose", "MatMul"]
    assert constants_of(model)["v"].shape == (5, 6)
    assert torch.equal(run(model, x)[0], want)


def test_what_has_no_value_stays():
    nodes = [
        helper.make_node("Reshape", ["flat", "shape"], ["y"]),
        helper.make_node("Constant", [], ["nothing"]),
    ]
    held = {"flat": weight(30), "shape": np.array([4, 4])}
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [1])}, {"y": 2}, held)
    before = model.SerializeToString()
    hoist_constants(model)
    assert model.SerializeToString() == before
