"""Operators of pt2mx as nodes of the domain `pt2mx`, for `torch.onnx.export`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from pt2mx import ops
from pt2mx.extras import import_extra
from pt2mx.formats import ELEMENTS
from pt2mx.kernels.packing import unpacked_length
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX, MXNode

onnx = import_extra("onnx", "onnx")
onnxscript = import_extra("onnxscript", "onnx")

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_BYTES = ["tensor(uint8)"]


def _operator(kind: type[MXNode], **inputs: str) -> Any:
    """The operator of a node, by its inputs and their types: T for any float."""
    schema = onnx.defs.OpSchema
    attributes = []
    for field in fields(kind):
        attribute_type = schema.AttrType.INT if field.type == "int" else schema.AttrType.STRING
        attributes.append(schema.Attribute(field.name, attribute_type))
    described = schema(
        kind.op_type,
        DOMAIN,
        VERSION,
        inputs=[schema.FormalParameter(name, type_name) for name, type_name in inputs.items()],
        outputs=[schema.FormalParameter("Y", "T")],
        type_constraints=[("T", _FLOATS, ""), ("B", _BYTES, "")],
        attributes=attributes,
    )
    return onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, VERSION), kind.op_type, described)


_FAKE_QUANTIZE = _operator(FakeQuantizeMX, X="T")
_DEQUANTIZE = _operator(DequantizeMX, codes="B", scale="B")


def _fake_quantize(
    x: Any,
    element: str,
    block_size: int,
    axis: int = -1,
    scale_mode: str = "floor",
    rounding: str = "even",
    seed: object = None,
    ste: str = "",
) -> Any:
    axis, length = _along(x, axis)
    node = FakeQuantizeMX(element, block_size, axis, length, scale_mode, rounding)
    return _FAKE_QUANTIZE(x, **asdict(node))


def _dequantize(
    codes: Any, scale: Any, element: str, block_size: int, dtype: Any, axis: int = -1, length: Any = None
) -> Any:
    axis, size = _along(codes, axis)
    if length is None:
        length = -1 if size == -1 else unpacked_length(size, ELEMENTS[element].bits)
    node = DequantizeMX(element, block_size, axis, length, int(dtype))
    return _DEQUANTIZE(codes, scale, **asdict(node))


def _along(x: Any, axis: int) -> tuple[int, int]:
    """The axis as nodes have it, and the extent there, -1 where that is dynamic."""
    if not x.shape:  # a scalar counts as one of shape (1,)
        return -1, 1
    length = x.shape[axis]
    axis %= len(x.shape)
    return (-1 if axis == len(x.shape) - 1 else axis), length if isinstance(length, int) else -1


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.fake_quantize_mx: _fake_quantize,
    ops.dequantize_mx: _dequantize,
}
