"""Float ONNX files of several opsets, as older and current exporters write them."""

import warnings

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import nn

import pt2mx
from pt2mx.pt2e.onnx.nodes import DequantizeMX

#: constants by name: arrays, or tensors of types that numpy lacks
Constants = dict[str, np.ndarray | TensorProto]


def model_of(
    nodes: list[NodeProto],
    inputs: dict[str, tuple[int, list]],
    outputs: dict[str, int],
    constants: Constants,
    opset: int = 18,
    ir_version: int = 10,
) -> ModelProto:
    """Return a model of nodes; `inputs` are (data type, shape) by name, `outputs` the ranks of float outputs.

    With an IR version below 4 all constants are inputs too.
    """
    values = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    initializers = [
        c if isinstance(c, TensorProto) else numpy_helper.from_array(c, name) for name, c in constants.items()
    ]
    if ir_version < 4:
        values += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in initializers]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * n) for name, n in outputs.items()]
    graph = helper.make_graph(nodes, "net", values, results, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    onnx.checker.check_model(model)
    return model


def weight(*shape: int) -> np.ndarray:
    """Return normally distributed values, as in a layer before training."""
    return (np.random.randn(*shape) / 8).astype(np.float32)


def old_network(opset: int, ir_version: int) -> ModelProto:
    """Return convolutions, one of them transposed, and matmuls with constants written in several ways.

    It is written as exporters did at opsets 11 and 13, where axes are attributes or inputs.
    """
    axes_are_inputs = opset >= 13
    constant = helper.make_node("Constant", [], ["w2"], "", value=numpy_helper.from_array(weight(40, 24)))
    nodes = [
        helper.make_node("Conv", ["x", "conv1.weight", "conv1.bias"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("ConvTranspose", ["r1", "up.weight"], ["c2"], "", strides=[2, 2]),
        helper.make_node("Conv", ["c2", "grouped.weight"], ["c3"], "grouped", group=2),
        helper.make_node("GlobalAveragePool", ["c3"], ["p"]),
        helper.make_node("Squeeze", ["p", "two"] if axes_are_inputs else ["p"], ["f"], "",
                         **({} if axes_are_inputs else {"axes": [2, 3]})),
        helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["g"], "fc", transB=1),
        constant,
        helper.make_node("Transpose", ["w2"], ["w2t"], "", perm=[1, 0]),
        helper.make_node("MatMul", ["g", "w2t"], ["m"], "head"),
        helper.make_node("Softmax", ["m"], ["y"], "", axis=1),
    ]  # fmt: skip
    constants = {
        "conv1.weight": weight(48, 3, 3, 3),
        "conv1.bias": weight(48),
        "up.weight": weight(48, 40, 2, 2),
        "grouped.weight": weight(36, 20, 3, 3),
        "fc.weight": weight(24, 36),
        "fc.bias": weight(24),
    }
    if axes_are_inputs:
        constants["two"] = np.array([2, 3])
    inputs = {"x": (TensorProto.FLOAT, ["batch", 3, 8, 8])}
    return model_of(nodes, inputs, {"y": 2}, constants, opset, ir_version)


def recurrent_network() -> ModelProto:
    """Return an embedding, an LSTM, a GRU whose last hidden state alone is used, and a head tied to the embedding."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], "embed"),  # (S, B, 40)
        helper.make_node("LSTM", ["e", "lw", "lr", "lb"], ["h"], "lstm", hidden_size=20, direction="bidirectional"),
        helper.make_node("Transpose", ["h"], ["t"], "", perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["t", "shape"], ["s"], ""),  # (S, B, 40)
        helper.make_node("GRU", ["s", "gw", "gr"], ["", "last"], "gru", hidden_size=40),
        helper.make_node("Squeeze", ["last", "zero"], ["l"], ""),  # (B, 40)
        helper.make_node("Transpose", ["table"], ["tt"], "", perm=[1, 0]),
        helper.make_node("MatMul", ["l", "tt"], ["y"], "head"),
    ]  # fmt: skip
    constants = {
        "table": weight(70, 40),
        "lw": weight(2, 80, 40),
        "lr": weight(2, 80, 20),
        "lb": weight(2, 160),
        "gw": weight(1, 120, 40),
        "gr": weight(1, 120, 40),
        "shape": np.array([0, 0, -1]),
        "zero": np.array([0]),
    }
    return model_of(nodes, {"ids": (TensorProto.INT64, ["length", "batch"])}, {"y": 2}, constants)


def branching_network() -> ModelProto:
    """Return a matmul, and one in each branch of an If; all use one constant of the outer graph."""

    def branch(name: str, factor: float) -> onnx.GraphProto:
        constant = numpy_helper.from_array(np.float32([factor]), f"{name}_factor")
        nodes = [
            helper.make_node("MatMul", ["h", "w"], [f"{name}_m"], f"{name}_matmul"),
            helper.make_node("Mul", [f"{name}_m", f"{name}_factor"], [f"{name}_y"], ""),
        ]
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [None] * 2)], [constant]
        )

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("If", ["flag"], ["y"], "choice", then_branch=branch("a", 2.0), else_branch=branch("b", 3.0)),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["batch", 40]), "flag": (TensorProto.BOOL, [])}
    return model_of(nodes, inputs, {"y": 2}, {"w": weight(40, 40)})


def export(module: nn.Module, inputs: tuple, path: str, dynamic_shapes: object = None) -> None:
    """Write a module with torch.onnx.export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own code
        program = torch.onnx.export(
            module.eval(), inputs, dynamo=True, verbose=False, dynamic_shapes=dynamic_shapes, external_data=False
        )
    assert program is not None
    program.save(path)


def with_dequantized_weights(floats: ModelProto, model: ModelProto) -> ModelProto:
    """Return the float model with the dequantized weights of the quantized one."""
    constants = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    plain = onnx.ModelProto.FromString(floats.SerializeToString())
    by_name = {t.name: t for t in plain.graph.initializer}
    by_name |= {n.output[0]: n.attribute[0].t for n in plain.graph.node if n.op_type == "Constant"}
    for node, a in DequantizeMX.nodes_in(model):
        codes, scale = (name if name in constants else producers[name].input[0] for name in node.input)
        values = pt2mx.dequantize_mx(constants[codes], constants[scale], a.spec, length=a.length)
        name = codes.removesuffix("_codes")
        by_name[name].CopyFrom(numpy_helper.from_array(values.numpy(), name))
    return plain
