"""The target "standard": QuantizeLinear and DequantizeLinear with native elements and E8M0 scales, for runtimes that
have kernels of them (opset 24). onnx's reference evaluator does, onnxruntime's CPU provider does not.

FP4 and FP8 codes are tensors of FLOAT4E2M1, FLOAT8E4M3FN and FLOAT8E5M2 with FLOAT8E8M0 scales; integers are INT8 with
float scales, for they count in 2**-6. The scale of an activation is computed by a function of standard operators. What
ONNX does not say exactly stays a node of the domain `pt2mx` with its body: FP6, which no type of opset 24 or 25 holds;
activations that are rounded in another way than to even, or are symmetric integers (QuantizeLinear reaches -128); and
vectors, in which ONNX has no blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pt2mx.pt2e.onnx.blocks import Blocks
from pt2mx.pt2e.onnx.bodies import add_bodies, unit_of
from pt2mx.pt2e.onnx.function import Function, onnx
from pt2mx.pt2e.onnx.names import names_in, unused
from pt2mx.pt2e.onnx.native_constants import NATIVE, NativeConstants
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX, MXNode, graphs_in
from pt2mx.pt2e.onnx.opsets import opset_of, raise_opset
from pt2mx.pt2e.onnx.shapes import TensorType, tensor_types
from pt2mx.pt2e.onnx.unread import remove_unread
from pt2mx.spec import MXSpec

_TYPE = onnx.TensorProto
#: the first opset whose QuantizeLinear and DequantizeLinear take E8M0 scales
_OPSET = 24
#: those that QuantizeLinear saturates as the element does
_QUANTIZED = ("fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "int8_full")


def to_standard(model: Any) -> Any:
    """Make ONNX's own nodes of those of the domain `pt2mx`, as far as there are exact ones, and return the model.

    The others keep the domain, and get bodies. A model of a lower opset is converted to 24.

    Raises:
        MXError: where that conversion fails.
    """
    if not any(entry.domain == DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    model = raise_opset(model, _OPSET)
    taken = names_in(model.graph)
    for graph in graphs_in(model.graph):
        _dequantize_weights(graph, taken)
    types = tensor_types(model, lambda node: FakeQuantizeMX.of(node) is not None)
    for graph in graphs_in(model.graph):
        _quantize_activations(model, graph, types, taken)
    return add_bodies(model)


def _dequantize_weights(graph: Any, taken: set[str]) -> None:
    """Put DequantizeLinear, and behind it the gather of rows, in the place of each dequantized constant."""
    constants = NativeConstants(graph, taken)
    producers = {name: node for node in graph.node for name in node.output}
    nodes: list[Any] = []
    for node in graph.node:
        attributes = DequantizeMX.of(node)
        gathers = [g for name in node.input if (g := producers.get(name)) is not None and _gathers_rows(g)]
        rows = gathers[0].input[1] if len(gathers) == 2 else ""
        names = [g.input[0] for g in gathers] if rows else list(node.input)
        packed = [constants.packed[name] for name in names if name in constants.packed]
        if attributes is None or attributes.element not in NATIVE or len(packed) != 2 or len(packed[0].dims) < 2:
            nodes.append(node)
            continue
        inputs = [constants.codes(names[0], attributes), constants.scales(names[1], attributes)]
        nodes += _dequantize(node, attributes, inputs, rows, taken)
    del graph.node[:]
    graph.node.extend(nodes)
    remove_unread(graph)


def _gathers_rows(node: Any) -> bool:
    return node.op_type == "Gather" and all(a.i == 0 for a in node.attribute if a.name == "axis")


def _dequantize(node: Any, attributes: DequantizeMX, inputs: list[str], rows: str, taken: set[str]) -> list[Any]:
    """The nodes in the place of a `DequantizeMX` of a constant, or of those `rows` of it; inputs: codes and scales."""
    last, kind = node.output[0], _blocks(attributes) | {"output_dtype": _TYPE.FLOAT}
    steps: list[tuple[str, list[str], dict[str, int]]] = [("DequantizeLinear", inputs, kind)]
    if attributes.dtype != _TYPE.FLOAT:  # exact in float32, then rounded
        steps.append(("Cast", [], {"to": attributes.dtype}))
    if rows:
        steps.append(("Gather", [rows], {"axis": 0}))
    made: list[Any] = []
    for i, (op_type, others, given) in enumerate(steps):
        output = last if i == len(steps) - 1 else unused(f"{last}_{op_type}", taken)
        before = [made[-1].output[0]] if made else []
        made.append(onnx.helper.make_node(op_type, before + others, [output], f"{node.name}_{op_type}", **given))
    return made


def _blocks(attributes: MXNode) -> dict[str, int]:
    return {"axis": attributes.axis, "block_size": attributes.block_size}


def _quantize_activations(model: Any, graph: Any, types: Mapping[str, TensorType], taken: set[str]) -> None:
    """Put the function of the scale, QuantizeLinear and DequantizeLinear in the place of each `FakeQuantizeMX`."""
    functions = {function.name for function in model.functions if function.domain == DOMAIN}
    nodes: list[Any] = []
    for node in graph.node:
        attributes, known = FakeQuantizeMX.of(node), types.get(node.input[0] if node.input else "", TensorType())
        if attributes is None or not _is_exact(attributes, known):
            nodes.append(node)
            continue
        function = _scale(attributes.spec, opset_of(model))
        if function.name not in functions:
            functions.add(function.name)
            model.functions.append(function)
        nodes += _quantize(node, attributes, function.name, taken, cast=known.dtype != _TYPE.FLOAT)
    del graph.node[:]
    graph.node.extend(nodes)


def _is_exact(attributes: FakeQuantizeMX, known: TensorType) -> bool:
    """True if QuantizeLinear rounds and saturates as a node does, and has blocks in its tensor."""
    is_vector = known.shape is not None and len(known.shape) < 2
    return attributes.element in _QUANTIZED and attributes.rounding == "even" and not is_vector


def _quantize(node: Any, attributes: FakeQuantizeMX, function: str, taken: set[str], cast: bool) -> list[Any]:
    """The nodes in the place of a `FakeQuantizeMX`; `cast` those around that take another type to float32 and back."""
    (x,), (y,) = node.input, node.output
    scale, codes = (unused(f"{y}_{name}", taken) for name in ("scale", "codes"))
    values, result = (unused(f"{y}_{name}", taken) for name in ("x", "values")) if cast else (x, y)
    blocks, element = _blocks(attributes), {"output_dtype": NATIVE[attributes.element], "precision": _TYPE.FLOAT}
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        (function, [x], scale, {"domain": DOMAIN}),
        ("QuantizeLinear", [values, scale], codes, blocks | element),
        ("DequantizeLinear", [codes, scale], result, blocks | {"output_dtype": _TYPE.FLOAT}),
    ]
    if cast:
        steps = [("Cast", [x], values, {"to": _TYPE.FLOAT}), *steps, ("CastLike", [result, x], y, {})]
    return [
        onnx.helper.make_node(op_type, inputs, [output], f"{node.name}_{op_type.partition('.')[0]}", **given)
        for op_type, inputs, output, given in steps
    ]


def _scale(spec: MXSpec, opset: int) -> Any:
    """The function of X that gives the scale of each block, as QuantizeLinear takes it."""
    blocks, element = Blocks.of(spec, -1), spec.element
    f = Function(f"ScaleMX.{element}_{spec.scale_mode}_{blocks.name}", ["X"], [])
    values = blocks.split(f, f.op("Cast", "X", to=_TYPE.FLOAT))
    unit = unit_of(f, f.op("ReduceMax", f.op("Abs", values), [blocks.inner]), spec)
    # a block with an Inf or a NaN has no other sum than these, and becomes NaN
    unit = f.op("Add", unit, f.op("Mul", f.op("ReduceSum", f.op("Div", values, unit), [blocks.inner]), 0.0))
    f.op("Squeeze", unit, [blocks.inner], output="unit")
    # a power of two; rounding "up", the default, the evaluator makes 2**-126 of 2**-127
    kind = {"to": _TYPE.FLOAT} if element.is_int else {"to": _TYPE.FLOAT8E8M0, "round_mode": "down"}
    f.op("Cast", "unit", output="Y", **kind)
    return f.proto(opset)
