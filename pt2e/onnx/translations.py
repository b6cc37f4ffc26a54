"""Operators of pt2mx as nodes of the domain `pt2mx`, for `torch.onnx.export`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.formats import ELEMENTS
from pt2mx.kernels.packing import unpacked_length
from pt2mx.pt2e.onnx.files import OPSET
from pt2mx.pt2e.onnx.function_bodies import body
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX, MXNode

onnx = import_extra("onnx", "onnx")
onnx_ir = import_extra("onnx_ir", "onnx")
onnxscript = import_extra("onnxscript", "onnx")

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_BYTES = ["tensor(uint8)"]
#: the inputs of each node and their types: T is a float type, B bytes, S of scales; the last one is optional
_INPUTS: dict[type[MXNode], dict[str, str]] = {
    FakeQuantizeMX: {"X": "T", "tensor_scale": "tensor(float)"},
    DequantizeMX: {"codes": "B", "scale": "S", "tensor_scale": "tensor(float)"},
}

#: meta key of the codes of an activation: the input and the arguments of their quantization
_QUANTIZED = "pt2mx.quantized"
#: meta key of a tensor scale that the graph computes: the tensor
_SCALED = "pt2mx.scaled"


def emit(node: MXNode, *inputs: Any) -> Any:
    """Add a node without a function to the graph that torch's exporter builds, and return its output."""
    return _operator(type(node), node.op_type)(*inputs, **asdict(node))


def emit_with_body(node: MXNode, *inputs: Any) -> Any:
    """Add a node to the graph and its function to the model, for the opset in which the exporter builds models."""
    static = isinstance(node, FakeQuantizeMX) and len(inputs) > 1
    function = onnx_ir.from_proto(body(node, OPSET, static))
    onnxscript.evaluator.default().functions[function.identifier()] = function
    return _operator(type(node), function.name)(*inputs, **asdict(node))


def _operator(kind: type[MXNode], op_type: str) -> Any:
    """Return the onnxscript operator of a node."""
    schema = onnx.defs.OpSchema
    attributes, option = [], schema.FormalParameterOption
    options = [option.Single] * (len(_INPUTS[kind]) - 1) + [option.Optional]
    for field in fields(kind):
        attribute_type = schema.AttrType.INT if field.type == "int" else schema.AttrType.STRING
        attributes.append(schema.Attribute(field.name, attribute_type))
    op_schema = schema(
        op_type,
        DOMAIN,
        VERSION,
        inputs=[
            schema.FormalParameter(name, type_name, param_option=option)
            for (name, type_name), option in zip(_INPUTS[kind].items(), options, strict=True)
        ],
        outputs=[schema.FormalParameter("Y", "T")],
        type_constraints=[
            (name, types, "")
            for name, types in (("T", _FLOATS), ("B", _BYTES), ("S", _BYTES + _FLOATS))
            if name in {"T", *_INPUTS[kind].values()}
        ],
        attributes=attributes,
    )
    return onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, VERSION), op_type, op_schema)


def translations(emit: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """Return operator -> translation, as `custom_translation_table` of torch's exporter takes it.

    Args:
        emit: called with a node and its inputs; returns the node's output.
    """

    def fake_quantize(
        x: Any,
        element: str,
        block_size: int,
        axis: int = -1,
        scale_mode: str = "floor",
        rounding: str = "even",
        seed: Any = None,
        ste: str = "",
        scale_format: str | None = None,
        block_rows: int | None = None,
        tensor_scale: Any = None,
    ) -> Any:
        axis, length = _along(x, axis)
        node = FakeQuantizeMX(element, block_size, axis, length, scale_mode, rounding)
        node = node.replace(scale_format=scale_format or "e8m0", block_rows=block_rows or 1)
        if tensor_scale is None or tensor_scale.meta.get(_SCALED) is x:
            return emit(node, x)
        if _SCALED in tensor_scale.meta:
            raise MXError(f"a tensor in {node.spec} has the scale of another tensor, for which ONNX has no node")
        return emit(node, x, tensor_scale)

    def quantize(
        x: Any,
        element: str,
        block_size: int,
        axis: int = -1,
        scale_mode: str = "floor",
        rounding: str = "even",
        seed: Any = None,
        scale_format: str | None = None,
        block_rows: int | None = None,
        tensor_scale: Any = None,
    ) -> Any:
        """Emit nothing, because no ONNX node returns codes: their dequantization becomes a fake quantization of x."""
        scale, codes = onnx_ir.Value(), onnx_ir.Value()
        scales = scale_format, block_rows, tensor_scale
        codes.meta[_QUANTIZED] = x, element, block_size, axis, scale_mode, rounding, None, "", *scales
        return scale, codes

    def scale_of_tensor(x: Any, element: str, scale_mode: str, scale_format: str) -> Any:
        """Emit nothing: a node without a tensor scale computes it."""
        t = onnx_ir.Value()
        t.meta[_SCALED] = x
        return t

    def dequantize(
        codes: Any,
        scale: Any,
        element: str,
        block_size: int,
        dtype: Any,
        axis: int = -1,
        length: Any = None,
        scale_format: str | None = None,
        block_rows: int | None = None,
        tensor_scale: Any = None,
    ) -> Any:
        if _QUANTIZED in codes.meta:
            return fake_quantize(*codes.meta[_QUANTIZED])
        axis, size = _along(codes, axis)
        if length is None:
            length = -1 if size == -1 else unpacked_length(size, ELEMENTS[element].bits)
        node = DequantizeMX(element, block_size, axis, length, int(dtype))
        node = node.replace(scale_format=scale_format or "e8m0", block_rows=block_rows or 1)
        return emit(node, codes, scale, *([] if tensor_scale is None else [tensor_scale]))

    return {
        ops.fake_quantize_mx: fake_quantize,
        ops.quantize_mx: quantize,
        ops.dequantize_mx: dequantize,
        ops.tensor_scale_mx: scale_of_tensor,
    }


def _along(x: Any, axis: int) -> tuple[int, int]:
    """Return the axis as nodes count it, and the size along it, -1 if it is dynamic."""
    if not x.shape:  # a scalar is treated as shape (1,)
        return -1, 1
    length = x.shape[axis]
    axis %= len(x.shape)
    return (-1 if axis == len(x.shape) - 1 else axis), length if isinstance(length, int) else -1
