"""Operators of pt2mx as nodes of the domain `pt2mx`, for `torch.onnx.export`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.kernels.packing import unpacked_length
from pt2mx.ops import quantization
from pt2mx.ops.operator import Operator
from pt2mx.ops.tensor_scale import TensorScale
from pt2mx.pt2e.onnx.files import OPSET
from pt2mx.pt2e.onnx.function_bodies import body
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX, MXNode
from pt2mx.spec import MXSpec

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
    return _operator(node, node.op_type)(*inputs, **node.attributes)


def emit_with_body(node: MXNode, *inputs: Any) -> Any:
    """Add a node to the graph and its function to the model, for the opset in which the exporter builds models."""
    static = isinstance(node, FakeQuantizeMX) and len(inputs) > 1
    function = onnx_ir.from_proto(body(node, OPSET, static))
    onnxscript.evaluator.default().functions[function.identifier()] = function
    return _operator(node, function.name)(*inputs, **node.attributes)


def _operator(node: MXNode, op_type: str) -> Any:
    """Return the onnxscript operator of a node."""
    schema, declared = onnx.defs.OpSchema, _INPUTS[type(node)]
    attributes, option = [], schema.FormalParameterOption
    options = [option.Single] * (len(declared) - 1) + [option.Optional]
    for name, value in node.attributes.items():
        attribute_type = schema.AttrType.INT if isinstance(value, int) else schema.AttrType.STRING
        attributes.append(schema.Attribute(name, attribute_type))
    op_schema = schema(
        op_type,
        DOMAIN,
        VERSION,
        inputs=[
            schema.FormalParameter(name, type_name, param_option=option)
            for (name, type_name), option in zip(declared.items(), options, strict=True)
        ],
        outputs=[schema.FormalParameter("Y", "T")],
        type_constraints=[
            (name, types, "")
            for name, types in (("T", _FLOATS), ("B", _BYTES), ("S", _BYTES + _FLOATS))
            if name in {"T", *declared.values()}
        ],
        attributes=attributes,
    )
    return onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, VERSION), op_type, op_schema)


def translations(emit: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """Return operator -> translation, as `custom_translation_table` of torch's exporter takes it.

    Args:
        emit: called with a node and its inputs; returns the node's output.
    """

    def fake_quantize(call: quantization.FakeQuantize[Any] | quantization.Quantize[Any]) -> Any:
        x, t = call.x, call.tensor_scale
        node = FakeQuantizeMX(*_along(x, call.spec))
        if t is None or t.meta.get(_SCALED) is x:
            return emit(node, x)
        if _SCALED in t.meta:
            raise MXError(f"a tensor in {node.spec} has the scale of another tensor, for which ONNX has no node")
        return emit(node, x, t)

    def quantize(call: quantization.Quantize[Any]) -> Any:
        """Emit nothing, because no ONNX node returns codes: their dequantization becomes a fake quantization of x."""
        scale, codes = onnx_ir.Value(), onnx_ir.Value()
        codes.meta[_QUANTIZED] = call
        return scale, codes

    def scale_of_tensor(call: TensorScale[Any]) -> Any:
        """Emit nothing: a node without a tensor scale computes it."""
        t = onnx_ir.Value()
        t.meta[_SCALED] = call.x
        return t

    def dequantize(call: quantization.Dequantize[Any]) -> Any:
        codes, t = call.codes, call.tensor_scale
        if _QUANTIZED in codes.meta:
            return fake_quantize(codes.meta[_QUANTIZED])
        spec, size = _along(codes, call.spec)
        length = call.length
        if length is None:
            length = -1 if size == -1 else unpacked_length(size, spec.element.bits)
        dtype: Any = call.dtype  # the exporter gives the type of ONNX
        node = DequantizeMX(spec, length, int(dtype))
        return emit(node, codes, call.scale, *([] if t is None else [t]))

    return {
        ops.fake_quantize_mx: _of_call(quantization.FakeQuantize, fake_quantize),
        ops.quantize_mx: _of_call(quantization.Quantize, quantize),
        ops.dequantize_mx: _of_call(quantization.Dequantize, dequantize),
        ops.tensor_scale_mx: _of_call(TensorScale, scale_of_tensor),
    }


def _of_call(operator: type[Operator[Any]], translate: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function of an operator's arguments: `translate` of the call that they make."""
    names = [argument.name for argument in operator.arguments]

    def translation(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return translate(operator.from_args(*[named.get(name) for name in names]))

    return translation


def _along(x: Any, spec: MXSpec) -> tuple[MXSpec, int]:
    """Return the spec with its axis as nodes count it, and the size along it, -1 if it is dynamic."""
    if not x.shape:  # a scalar is treated as shape (1,)
        return spec.replace(axis=-1), 1
    length, rank = x.shape[spec.axis], len(x.shape)
    axis = spec.axis % rank
    return spec.replace(axis=-1 if axis == rank - 1 else axis), length if isinstance(length, int) else -1
