"""The graph of a converted model for transformers' `OnnxExporter`."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.graph_pass import run_passes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import Dequantize, FakeQuantize
from pt2mx.fx.graph.qdq import spec_of_dequantize
from pt2mx.fx.graph.tensors import delete_unused_tensors
from pt2mx.fx.passes.fuse_qdq import cse_quantize, fuse_qdq, merge_fake_quantize
from pt2mx.pt2e.onnx.exportable import drop_size_assertions
from pt2mx.pt2e.onnx.files import OPSET
from pt2mx.pt2e.onnx.function_bodies import dequantize, fake_quantize
from pt2mx.pt2e.onnx.register import register_onnx_translations


def onnx_graph(program: ExportedProgram) -> GraphModule:
    """Return the graph with one operator for each quantized tensor, and register their ONNX functions.

    Raises:
        MXError: where the extra `onnx` is not installed, and for a tensor in a format without an ONNX function, with
            those that have one.
    """
    register_onnx_translations()
    model = program.module()
    for graph in graph_modules(model):
        run_passes(graph, (drop_size_assertions, cse_quantize, fuse_qdq, merge_fake_quantize))
        for node in graph.graph.nodes:
            _check(node)
    delete_unused_tensors(model)
    return model


def _check(node: Node) -> None:
    """Raise the error of the node's ONNX function here, where the exporter does not bury it under its own."""
    if (call := FakeQuantize.of(node)) is not None:
        fake_quantize(call.spec.replace(axis=-1), OPSET)
    elif Dequantize.of(node) is not None:
        dequantize(spec_of_dequantize(node).replace(axis=-1), OPSET)
