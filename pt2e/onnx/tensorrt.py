"""The target "tensorrt": the nodes of the domain `trt` that NVIDIA's ModelOpt writes for MXFP8 (0.47.0).

`TRT_MXFP8DynamicQuantize`: X -> codes FLOAT8E4M3FN, scales UINT8. `TRT_MXFP8DequantizeLinear`: codes, scales -> Y in
the type `output_dtype`. TensorRT computes the scales of activations itself, by the rule of the scale mode `rceil`.

Source: modelopt/torch/quantization/export_onnx.py, modelopt/onnx/export/mxfp8_exporter.py; TensorRT's page of the
operator DynamicQuantize for the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.files import (
    TensorType,
    fresh_name,
    import_domain,
    known_types,
    raise_opset,
    replace_nodes,
    tensor_types,
    used_names,
)
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.nodes import DOMAIN, DequantizeMX, FakeQuantizeMX, MXNode, graphs_in
from pt2mx.pt2e.onnx.standard import dequantize_weights
from pt2mx.spec import MXSpec

_TYPE = onnx.TensorProto
QUANTIZE, DEQUANTIZE = "TRT_MXFP8DynamicQuantize", "TRT_MXFP8DequantizeLinear"
#: the domain of the nodes, and the first opset with FLOAT8E4M3FN
TENSORRT, OPSET = "trt", 19
#: the format that TensorRT computes
FORMAT = MXSpec("fp8_e4m3", 32, scale_mode="rceil")


def to_tensorrt(model: Any) -> Any:
    """Replace the nodes of the domain `pt2mx` in a model by TensorRT's nodes, and return the model.

    Raises:
        MXError: for a tensor of another format, number of dimensions or axis, or of a size that is dynamic or no
            multiple of 32, and for one in a branch or a loop; the error names the node.
    """
    _, *branches = graphs_in(model.graph)
    for node in (node for branch in branches for node in branch.node if node.domain == DOMAIN):
        raise MXError(
            f"{node.name} is in a branch or a loop, and for TensorRT only the main graph is quantized: leave the "
            "module in float, or take another target"
        )
    model = raise_opset(model, OPSET)
    types = tensor_types(model, lambda node: FakeQuantizeMX.of(node) is not None) | known_types(model)
    for node, said in (*DequantizeMX.nodes_in(model), *FakeQuantizeMX.nodes_in(model)):
        _check(node, said, types.get(node.input[0], TensorType()))
    used = used_names(model.graph)
    dequantize_weights(model.graph, used)
    _rename_dequantizations(model.graph)
    _quantize_activations(model.graph, types, used)
    import_domain(model, TENSORRT, 1)
    return model


def _check(node: Any, said: MXNode, known: TensorType) -> None:
    """Raise an MXError for a node that TensorRT does not have."""
    spec, rank, size = said.spec, len(known.shape or ()), said.length
    if isinstance(said, DequantizeMX):  # which does not tell the scale mode
        spec = spec.replace(scale_mode=FORMAT.scale_mode)
    if spec.replace(axis=-1) != FORMAT:
        raise MXError(
            f"{node.name}: TensorRT has no node for {spec}: it takes {FORMAT}; give the module this format, leave it "
            "in float, or take another target"
        )
    if rank not in (2, 3) or spec.axis not in (-1, rank - 2, rank - 1) or size < 1 or size % FORMAT.block_size:
        raise MXError(
            f"{node.name}: TensorRT has no node for blocks along axis {spec.axis} of {rank} dimensions and {size} "
            "values (-1: dynamic): it takes one of the last two of 2 or 3 dimensions, and a static multiple of "
            f"{FORMAT.block_size}; leave the module in float, or take another target"
        )


def _rename_dequantizations(graph: Any) -> None:
    """Make the DequantizeLinear nodes of MX weights TensorRT's."""
    scales = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == _TYPE.FLOAT8E8M0}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[1] in scales:
            node.op_type, node.domain = DEQUANTIZE, TENSORRT
    for tensor in scales.values():
        tensor.data_type = _TYPE.UINT8


def _quantize_activations(graph: Any, types: Mapping[str, TensorType], used: set[str]) -> None:
    nodes: list[Any] = []
    for node in graph.node:
        said = FakeQuantizeMX.of(node)
        if said is None:
            nodes.append(node)
            continue
        (x,), (y,) = node.input, node.output
        codes = [fresh_name(f"{y}_{name}", used) for name in ("codes", "scale")]
        blocks = {"domain": TENSORRT, "axis": said.spec.axis, "block_size": said.spec.block_size}
        kind = types[x].dtype
        make = onnx.helper.make_node
        nodes += [
            make(QUANTIZE, [x], codes, f"{node.name}_{QUANTIZE}", output_dtype=_TYPE.FLOAT8E4M3FN, **blocks),
            make(DEQUANTIZE, codes, [y], f"{node.name}_{DEQUANTIZE}", output_dtype=kind, **blocks),
        ]
    replace_nodes(graph, nodes)
