"""Run ONNX models in onnxruntime, and compare their nodes of the domain `pt2mx` with pt2mx's operators."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import torch
from onnx import NodeProto, TensorProto, helper
from torch import Tensor

import pt2mx
from pt2mx.ops.quantization import Dequantize
from pt2mx.pt2e.onnx.function_bodies import add_bodies
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX
from tests.compare import differing

DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT64: torch.int64,
}


def model_of(nodes: list[NodeProto], inputs: dict[str, tuple[int, list]], opset: int = 18) -> onnx.ModelProto:
    """Return a model of nodes with their functions and all their outputs; `inputs` are (data type, shape) by name."""
    values = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    outputs = [onnx.ValueInfoProto(name=node.output[0]) for node in nodes]
    graph = helper.make_graph(nodes, "net", values, outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)]
    return add_bodies(helper.make_model(graph, opset_imports=imports, ir_version=10))


def session(model: onnx.ModelProto | str, threads: int = 1) -> onnxruntime.InferenceSession:
    """Return a session on the CPU, by default on one core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    source = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto | str, *inputs: Tensor | np.ndarray) -> list[Tensor]:
    """Return the outputs for inputs in the model's order."""
    runtime = session(model)
    names = [value.name for value in runtime.get_inputs()]
    return [torch.from_numpy(y) for y in runtime.run(None, dict(zip(names, map(np.asarray, inputs), strict=True)))]


def differences(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return node -> the number of output values whose bits differ from the results of pt2mx's operator for the same
    inputs.

    All NaNs are equal. Nodes in subgraphs are not compared.
    """
    model = onnx.ModelProto.FromString(model.SerializeToString())
    kinds = (FakeQuantizeMX, DequantizeMX)
    nodes = [(node, mx) for kind in kinds for node in model.graph.node if (mx := kind.of(node)) is not None]
    constants = {c.name: _tensor(onnx.numpy_helper.to_array(c)) for c in model.graph.initializer}
    names = dict.fromkeys(name for node, _ in nodes for name in (*node.input, *node.output) if name not in constants)
    known = {value.name for value in (*model.graph.input, *model.graph.output)}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    inputs = {name: torch.from_numpy(array) for name, array in feeds.items()}
    computed = [name for name in names if name not in inputs]
    values = (
        constants | inputs | dict(zip(computed, map(_tensor, session(model).run(computed, dict(feeds))), strict=True))
    )
    return {
        node.name: int(differing(values[node.output[0]], operator(attributes, *(values[i] for i in node.input))).sum())
        for node, attributes in nodes
    }


def operator(node: FakeQuantizeMX | DequantizeMX, *inputs: Tensor) -> Tensor:
    """Compute the output of a node with pt2mx's operator."""
    if isinstance(node, FakeQuantizeMX):
        x, *tensor_scale = inputs
        return pt2mx.fake_quantize_mx(x, node.spec, tensor_scale=next(iter(tensor_scale), None))
    dtype, length = DTYPES[node.dtype], None if node.length == -1 else node.length
    codes, scale, *tensor_scale = inputs
    return Dequantize(codes, scale, node.spec, dtype, length, next(iter(tensor_scale), None)).call()


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
