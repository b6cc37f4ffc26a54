import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from pt2mx.pt2e.onnx.float_batch_norm import fold_batch_norms
from tests.onnx_float_files import model_of, weight
from tests.onnx_nodes import run

NORM = ("gain", "shift", "mean", "variance")


def network(conv, norm=(), constants=(), **attributes):
    """A convolution, a batch norm and a ReLU."""
    np.random.seed(0)
    nodes = [
        helper.make_node(conv, ["x", "w", *(["b"] if "b" in dict(constants) else [])], ["c"], "conv", **attributes),
        helper.make_node("BatchNormalization", ["c", *NORM], ["n"], "norm", epsilon=1e-3, **dict(norm)),
        helper.make_node("Relu", ["n"], ["y"], "relu"),
    ]
    held = {"w": weight(8, 6, 3, 3) if conv == "Conv" else weight(6, 8, 3, 3)}
    held |= {"gain": weight(8) + 1, "shift": weight(8), "mean": weight(8), "variance": weight(8) ** 2 + 0.1}
    return model_of(nodes, {"x": (TensorProto.FLOAT, [None, 6, 9, 9])}, {"y": 4}, held | dict(constants))


@pytest.mark.parametrize("conv", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("constants", [{}, {"b": np.float32(np.arange(8))}])
def test_a_batch_norm_is_folded(conv, constants):
    model = network(conv, constants=constants)
    x = torch.from_numpy(weight(2, 6, 9, 9))
    (want,) = run(model, x)
    fold_batch_norms(model)
    onnx.checker.check_model(model, full_check=True)
    assert [(node.name, *node.output) for node in model.graph.node] == [("conv", "n"), ("relu", "y")]
    assert torch.allclose(run(model, x)[0], want, atol=1e-5)


def test_several_in_a_row_and_half_precision():
    held = {"w": weight(8, 8, 1, 1).astype(np.float16)}
    held |= {name: np.float16(weight(8) + 1) for name in NORM}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv")]
    nodes += [helper.make_node("BatchNormalization", [i, *NORM], [o], o) for i, o in ("cn", "ny")]
    model = model_of(nodes, {"x": (TensorProto.FLOAT16, [1, 8, 2, 2])}, {"y": 4}, held)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    x = torch.from_numpy(weight(1, 8, 2, 2)).half()
    (want,) = run(model, x)
    fold_batch_norms(model)
    assert [node.op_type for node in model.graph.node] == ["Conv"]
    assert torch.allclose(run(model, x)[0], want, atol=0.02)


def second_reader(model):
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


@pytest.mark.parametrize("change", [second_reader, shared_weight, computed_gain, default_of_an_input, output])
def test_what_cannot_be_folded_stays(change):
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


def test_the_name_of_the_bias_is_a_new_one():
    model = network("Conv", constants={"n_bias": weight(8)})
    model.graph.node.append(helper.make_node("Neg", ["n_bias"], ["also"]))
    fold_batch_norms(model)
    onnx.checker.check_model(model)
    assert list(model.graph.node[0].input) == ["x", "w", "n_bias_1"]
