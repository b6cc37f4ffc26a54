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

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pt2mx.kernels.elements import NAN_SCALE
from pt2mx.kernels.float_scales import scale_values
from pt2mx.kernels.packing import pack, unpack
from pt2mx.pt2e.onnx.block_scales import tensor_scale
from pt2mx.pt2e.onnx.files import (
    TensorType,
    as_torch,
    fresh_name,
    import_domain,
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
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX, MXNode, graphs_in
from pt2mx.spec import MXSpec

_TYPE = onnx.TensorProto
#: the first opset whose QuantizeLinear and DequantizeLinear take E8M0 scales
NATIVE_OPSET = 24
#: elements that QuantizeLinear saturates as pt2mx does
_QUANTIZED = ("fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "int8_full")
#: element -> the type of a tensor of its codes
NATIVE = {
    "fp4_e2m1": _TYPE.FLOAT4E2M1,
    "fp8_e4m3": _TYPE.FLOAT8E4M3FN,
    "fp8_e5m2": _TYPE.FLOAT8E5M2,
    "int8": _TYPE.INT8,
    "int8_full": _TYPE.INT8,
}


def to_standard(model: Any) -> Any:
    """Replace the nodes of the domain `pt2mx` by ONNX's own operators if these are exact, and return the model.

    The others get functions. A model of a lower opset is converted to 24.
    """
    import_domain(model, DOMAIN, VERSION)
    model = raise_opset(model, NATIVE_OPSET)
    used = used_names(model.graph)
    for graph in graphs_in(model.graph):
        dequantize_weights(graph, used)
    types = tensor_types(model, lambda node: FakeQuantizeMX.of(node) is not None)
    for graph in graphs_in(model.graph):
        _quantize_activations(model, graph, types, used)
    return add_bodies(model)


def is_native(attributes: DequantizeMX) -> bool:
    """Return whether DequantizeLinear has the element and the blocks of a weight."""
    return attributes.spec.element.name in NATIVE and attributes.spec.block_rows == 1


def dequantize_weights(
    graph: Any, used: set[str], takes: Callable[[DequantizeMX], bool] = is_native, of_rows: bool = True
) -> None:
    """Replace dequantized constants by DequantizeLinear.

    Args:
        graph, used: the graph and the names in use, which change.
        takes: returns whether to replace the dequantization of a native weight.
        of_rows: replace the dequantization of gathered rows, too, by a gather of rows of the values.
    """
    constants = _NativeConstants(graph, used)
    producers = producers_of(graph)
    nodes: list[Any] = []
    for node in graph.node:
        attributes = DequantizeMX.of(node)
        gathers = [producers[name] for name in node.input if name in producers and _gathers_rows(producers[name])]
        rows, names = "", list(node.input)
        if len(gathers) == 2 and of_rows:
            rows = gathers[0].input[1]
            names[:2] = [gather.input[0] for gather in gathers]  # next to the scale of the tensor
        packed = [constants.packed[name] for name in names if name in constants.packed]
        if attributes is None or not takes(attributes) or len(packed) < len(node.input) or len(packed[0].dims) < 2:
            nodes.append(node)
            continue
        scale = constants.scales(names[1], attributes, *names[2:])
        if names[2:]:
            scale = _times_tensor_scale(node, scale, names[2], attributes, used, nodes)
        nodes += _dequantize(node, attributes, [constants.codes(names[0], attributes), scale], rows, used)
    replace_nodes(graph, nodes)
    remove_unused(graph)


def _times_tensor_scale(
    node: Any, scale: str, tensor_scale: str, attributes: DequantizeMX, used: set[str], nodes: list[Any]
) -> str:
    """Append the nodes that multiply scales by the scale of the tensor, or divide them by it; return the result."""

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


class _NativeConstants:
    """The packed codes and scales of a graph as constants of native types.

    Nodes that share codes or scales share the native constant, unless their attributes ask for different ones.
    """

    def __init__(self, graph: Any, used: set[str]) -> None:
        self.packed = {tensor.name: tensor for tensor in graph.initializer}
        self._graph, self._used = graph, used
        self._names: dict[tuple[object, ...], str] = {}

    def codes(self, name: str, attributes: DequantizeMX) -> str:
        """Return the name of the native codes of a weight with these attributes."""
        key = attributes.spec.element.name, attributes.spec.axis, attributes.length
        return self._native(name, key, lambda packed: _codes(packed, attributes))

    def scales(self, name: str, attributes: DequantizeMX, tensor_scale: str = "") -> str:
        """Return the name of the native scales of a weight with these attributes. With a tensor scale they are not yet
        multiplied by it."""
        if tensor_scale:
            return self._native(name, (), _e4m3_scales)
        if not attributes.spec.has_power_of_two_scale:
            return self._native(name, (), lambda s: _float_scales(s, attributes))
        element = attributes.spec.element
        return self._native(name, (element.mantissa_bits,) if element.is_int else (), lambda s: _scales(s, attributes))

    def _native(self, name: str, key: tuple[object, ...], convert: Callable[[Tensor], Any]) -> str:
        key = (name, *key)
        if key not in self._names:
            tensor = convert(as_torch(self.packed[name]))
            tensor.name = self._names[key] = fresh_name(f"{name}_native", self._used)
            self._graph.initializer.append(tensor)
        return self._names[key]


def _codes(packed: Tensor, attributes: DequantizeMX) -> Any:
    axis, element = attributes.spec.axis % packed.dim(), attributes.spec.element
    codes = unpack(packed, axis, element.bits).to(torch.uint8)
    if attributes.length > 0:
        codes = codes.narrow(axis, 0, attributes.length)
    raw = codes.flatten()
    if element.bits == 4:  # ONNX packs two codes into a byte in row-major order, the first in the low bits
        raw = pack(raw.to(torch.int32), 0, element.bits)
    return onnx.helper.make_tensor("", NATIVE[element.name], codes.shape, raw.numpy().tobytes(), raw=True)


def _e4m3_scales(scales: Tensor) -> Any:
    return onnx.helper.make_tensor("", _TYPE.FLOAT8E4M3FN, scales.shape, scales.numpy().tobytes(), raw=True)


def _float_scales(scales: Tensor, attributes: DequantizeMX) -> Any:
    """Return scales with a significand as float32."""
    return onnx.numpy_helper.from_array(scale_values(scales, attributes.spec).numpy())


def _scales(scales: Tensor, attributes: DequantizeMX) -> Any:
    """Return E8M0 scales as a native tensor; for integer elements, as the float values of a code's unit."""
    element = attributes.spec.element
    if not element.is_int:
        return onnx.helper.make_tensor("", _TYPE.FLOAT8E8M0, scales.shape, scales.numpy().tobytes(), raw=True)
    unit = np.ldexp(np.float32(1), scales.numpy().astype(np.int32) - 127 - element.mantissa_bits)
    return onnx.numpy_helper.from_array(np.where(scales.numpy() == NAN_SCALE, np.float32(np.nan), unit))
