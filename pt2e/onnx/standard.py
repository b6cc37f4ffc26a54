"""The target "standard": QuantizeLinear and DequantizeLinear with native elements and scales (opset 24).

It is for runtimes with kernels for these operators. onnx's reference evaluator has the kernels, onnxruntime's CPU
provider lacks them.

FP4 and FP8 codes are tensors of FLOAT4E2M1, FLOAT8E4M3FN and FLOAT8E5M2 with FLOAT8E8M0 scales. Integers are INT8 with
float scales, because their unit is 2**-6. NVFP4's scales are FLOAT8E4M3FN, which DequantizeLinear takes as values only:
a first one multiplies them by the scale of the tensor. Other scales are float. A function of standard operators
computes the scale of an activation.

Nodes without an exact equivalent stay in the domain `pt2mx` with their functions: FP6, which no type of opset 24 or 25
has; blocks of several rows; activations with another rounding than even, in symmetric integers (QuantizeLinear reaches
-128), or multiplied by the reciprocal of a scale; and vectors, for which ONNX has no blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pt2mx.pt2e.onnx.block_scales import tensor_scale
from pt2mx.pt2e.onnx.files import (
    TensorType,
    fresh_name,
    opset_of,
    producers_of,
    raise_opset,
    remove_unused,
    replace_nodes,
    tensor_types,
    used_names,
)
from pt2mx.pt2e.onnx.function import Blocks, Function, onnx
from pt2mx.pt2e.onnx.function_bodies import add_bodies, float_scales, in_powers_of_two, scales_name
from pt2mx.pt2e.onnx.native import NATIVE, NATIVE_OPSET, NativeConstants, is_native
from pt2mx.pt2e.onnx.nodes import DOMAIN, DequantizeMX, FakeQuantizeMX, MXNode, graphs_in
from pt2mx.spec import MXSpec

_TYPE = onnx.TensorProto
#: elements that QuantizeLinear saturates as pt2mx does
_QUANTIZED = ("fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "int8_full")


def to_standard(model: Any) -> Any:
    """Replace the nodes of the domain `pt2mx` by ONNX's own operators if these are exact, and return the model.

    The others get functions. A model of a lower opset is converted to 24.
    """
    model = raise_opset(model, NATIVE_OPSET)
    used = used_names(model.graph)
    for graph in graphs_in(model.graph):
        dequantize_weights(graph, used)
    types = tensor_types(model, lambda node: FakeQuantizeMX.of(node) is not None)
    for graph in graphs_in(model.graph):
        _quantize_activations(model, graph, types, used)
    return add_bodies(model)


def dequantize_weights(graph: Any, used: set[str]) -> None:
    """Replace dequantized constants by DequantizeLinear, and dequantized rows by a gather of rows of the values."""
    constants = NativeConstants(graph, used)
    producers = producers_of(graph)
    nodes: list[Any] = []
    for node in graph.node:
        attributes = DequantizeMX.of(node)
        gathers = [producers[name] for name in node.input if name in producers and _gathers_rows(producers[name])]
        rows, names = "", list(node.input)
        if len(gathers) == 2:
            rows = gathers[0].input[1]
            names[:2] = [gather.input[0] for gather in gathers]  # next to the scale of the tensor
        packed = [constants.packed[name] for name in names if name in constants.packed]
        if attributes is None or not is_native(attributes) or len(packed) < len(node.input) or len(packed[0].dims) < 2:
            nodes.append(node)
            continue
        scale = constants.scales(names[1], attributes, *names[2:])
        if names[2:]:
            scale = times_tensor_scale(node, scale, names[2], attributes, used, nodes)
        nodes += _dequantize(node, attributes, [constants.codes(names[0], attributes), scale], rows, used)
    replace_nodes(graph, nodes)
    remove_unused(graph)


def times_tensor_scale(
    node: Any, scale: str, tensor_scale: str, attributes: DequantizeMX, used: set[str], nodes: list[Any]
) -> str:
    """Append nodes that multiply native scales by the scale of the tensor, or divide them by it; return the result."""

    def add(op_type: str, *inputs: str, **to: int) -> str:
        output = fresh_name(f"{scale}_{op_type}", used)
        nodes.append(onnx.helper.make_node(op_type, inputs, [output], f"{node.name}_scale_{op_type}", **to))
        return output

    if attributes.spec.divides_by_tensor_scale:
        return add("Div", add("Cast", scale, to=_TYPE.FLOAT), tensor_scale)
    return add("DequantizeLinear", scale, tensor_scale)


def _gathers_rows(node: Any) -> bool:
    return node.op_type == "Gather" and all(a.i == 0 for a in node.attribute if a.name == "axis")


def _dequantize(node: Any, attributes: DequantizeMX, inputs: list[str], rows: str, used: set[str]) -> list[Any]:
    """Return the nodes that replace a `DequantizeMX` of a constant, or of some `rows` of it.

    `inputs` are the names of codes and scales.
    """
    last, blocked = node.output[0], _blocks(attributes) | {"output_dtype": _TYPE.FLOAT}
    steps: list[tuple[str, list[str], dict[str, int]]] = [("DequantizeLinear", inputs, blocked)]
    if attributes.dtype != _TYPE.FLOAT:  # exact in float32, then rounded
        steps.append(("Cast", [], {"to": attributes.dtype}))
    if rows:
        steps.append(("Gather", [rows], {"axis": 0}))
    nodes: list[Any] = []
    for i, (op_type, others, step) in enumerate(steps):
        output = last if i == len(steps) - 1 else fresh_name(f"{last}_{op_type}", used)
        before = [nodes[-1].output[0]] if nodes else []
        nodes.append(onnx.helper.make_node(op_type, before + others, [output], f"{node.name}_{op_type}", **step))
    return nodes


def _blocks(attributes: MXNode) -> dict[str, int]:
    return {"axis": attributes.spec.axis, "block_size": attributes.spec.block_size}


def _quantize_activations(model: Any, graph: Any, types: Mapping[str, TensorType], used: set[str]) -> None:
    """Replace each `FakeQuantizeMX` by the function of the scale, QuantizeLinear and DequantizeLinear."""
    functions = {function.name for function in model.functions if function.domain == DOMAIN}
    nodes: list[Any] = []
    for node in graph.node:
        attributes, known = FakeQuantizeMX.of(node), types.get(node.input[0] if node.input else "", TensorType())
        if attributes is None or not _is_exact(attributes, known):
            nodes.append(node)
            continue
        function = _scale_function(attributes.spec, opset_of(model), len(node.input) > 1)
        if function.name not in functions:
            functions.add(function.name)
            model.functions.append(function)
        nodes += _quantize(node, attributes, function.name, used, cast=known.dtype != _TYPE.FLOAT)
    replace_nodes(graph, nodes)


def _is_exact(attributes: FakeQuantizeMX, known: TensorType) -> bool:
    """Return whether QuantizeLinear rounds and saturates as the node does, and has blocks for its tensor."""
    is_vector = known.shape is not None and len(known.shape) < 2
    spec = attributes.spec
    divides = spec.block_rows == 1 and not spec.multiplies_by_reciprocal
    return spec.element.name in _QUANTIZED and spec.rounding == "even" and not is_vector and divides


def _quantize(node: Any, attributes: FakeQuantizeMX, function: str, used: set[str], cast: bool) -> list[Any]:
    """Return the nodes that replace a `FakeQuantizeMX`. With `cast`, others convert X to float32 and Y back."""
    (x, *tensor_scale), (y,) = node.input, node.output
    scale, codes = fresh_name(f"{y}_scale", used), fresh_name(f"{y}_codes", used)
    values, result = (fresh_name(f"{y}_x", used), fresh_name(f"{y}_values", used)) if cast else (x, y)
    blocks = _blocks(attributes)
    element = {"output_dtype": NATIVE[attributes.spec.element.name], "precision": _TYPE.FLOAT}
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        (function, [x, *tensor_scale], scale, {"domain": DOMAIN}),
        ("QuantizeLinear", [values, scale], codes, blocks | element),
        ("DequantizeLinear", [codes, scale], result, blocks | {"output_dtype": _TYPE.FLOAT}),
    ]
    if cast:
        steps = [("Cast", [x], values, {"to": _TYPE.FLOAT}), *steps, ("CastLike", [result, x], y, {})]
    nodes = []
    for op_type, inputs, output, step in steps:
        name = f"{node.name}_{op_type.partition('.')[0]}"
        nodes.append(onnx.helper.make_node(op_type, inputs, [output], name, **step))
    return nodes


def _scale_function(spec: MXSpec, opset: int, static: bool) -> Any:
    """Return the function that computes the scale of each block of X, as QuantizeLinear takes it; with `static` the
    scale of the tensor is a second input."""
    blocks, element = Blocks.of(spec, -1), spec.element
    name = f"ScaleMX.{element}_{scales_name(spec)}{spec.scale_mode}_{blocks.name}"
    inputs = ["X", "tensor_scale"] if static else ["X"]
    f = Function(name + "_static" * static, inputs, [])
    x = f.op("Cast", "X", to=_TYPE.FLOAT)
    values = blocks.split(f, x)
    if not spec.has_power_of_two_scale:
        t = tensor_scale(f, x, spec, inputs[-1] if static else "") if spec.has_tensor_scale else 1.0
        f.op("Squeeze", float_scales(f, values, blocks, spec, t)[1], [blocks.inner], output="Y")
        return f.proto(opset)
    _, unit = in_powers_of_two(f, values, blocks, spec)
    f.op("Squeeze", unit, [blocks.inner], output="unit")
    # the unit is a power of two, but the evaluator rounds 2**-127 to 2**-126 with "up", the default
    kind = {"to": _TYPE.FLOAT} if element.is_int else {"to": _TYPE.FLOAT8E8M0, "round_mode": "down"}
    f.op("Cast", "unit", output="Y", **kind)
    return f.proto(opset)
