"""TensorRT's nodes in ONNX text (`onnx.parser.parse_model` reads it): DQ layers with E8M0 scales."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.targets.mlir import rows_of
from pt2mx.fx.targets.parts import Matmul, Pair, Shape, parts_of
from pt2mx.fx.targets.table import Target

#: dtype -> its name in ONNX text, and its number, a `TensorProto.DataType`
_FLOATS = {torch.float32: ("float", 1), torch.float16: ("float16", 10), torch.bfloat16: ("bfloat16", 16)}
_FLOAT8E4M3FN = 17
_HEADER = '<ir_version: 12, opset_import: ["" : 24, "trt" : 1]>'


def to_tensorrt(model: GraphModule, target: Target) -> str:
    """Write a model whose graph has each linear layer, and each other quantized tensor, as inputs and an output."""
    inputs: list[str] = []
    outputs: list[str] = []
    nodes: list[str] = []
    for part in parts_of(model):
        weight = part.weight if isinstance(part, Matmul) else part
        x = part.x if isinstance(part, Matmul) else None if part.is_weight else part
        if weight.is_weight:
            element = target.elements[weight.spec.element.name]
            scale = "uint8" if weight.spec.element.name == "fp8_e4m3" else "float8e8m0"
            inputs += [_value(f"{part.name}_codes", element, weight.shape)]
            inputs += [_value(f"{part.name}_scale", scale, weight.scale_shape)]
            nodes += [_dequantize(f"{part.name}_w", f"{part.name}_codes, {part.name}_scale", weight)]
        if x is not None:
            m = (rows_of(x.shape), x.shape[-1])
            inputs += [_value(f"{part.name}_x", _type(x)[0], m)]
            nodes += _quantize(part.name, x)
        if isinstance(part, Matmul):
            nodes += [
                f"{part.name}_t = Transpose <perm = [1, 0]> ({part.name}_w)",
                f"{part.name}_y = MatMul ({part.name}_d, {part.name}_t)",
            ]
            outputs += [_value(f"{part.name}_y", _type(part.x)[0], (rows_of(part.x.shape), weight.shape[0]))]
        elif part.is_weight:
            outputs += [_value(f"{part.name}_w", _type(part)[0], part.shape)]
        else:
            outputs += [_value(f"{part.name}_d", _type(part)[0], (rows_of(part.shape), part.shape[-1]))]
    body = "\n".join(f"  {node}" for node in nodes)
    return f"{_HEADER}\nmx_parts ({', '.join(inputs)}) => ({', '.join(outputs)}) {{\n{body}\n}}\n"


def _quantize(name: str, pair: Pair) -> list[str]:
    block = f"axis = -1, block_size = {pair.spec.block_size}, output_dtype = {_FLOAT8E4M3FN}"
    first = f"{name}_q, {name}_s = trt.TRT_MXFP8DynamicQuantize <{block}> ({name}_x)"
    return [first, _dequantize(f"{name}_d", f"{name}_q, {name}_s", pair)]


def _dequantize(result: str, operands: str, pair: Pair) -> str:
    operator = "trt.TRT_MXFP8DequantizeLinear" if pair.spec.element.name == "fp8_e4m3" else "DequantizeLinear"
    block = f"axis = -1, block_size = {pair.spec.block_size}, output_dtype = {_type(pair)[1]}"
    return f"{result} = {operator} <{block}> ({operands})"


def _type(pair: Pair) -> tuple[str, int]:
    if pair.dtype not in _FLOATS:
        raise MXError(f"{pair.name} is of {pair.dtype}, and TensorRT has {', '.join(map(str, _FLOATS))}")
    return _FLOATS[pair.dtype]


def _value(name: str, element: str, shape: Shape) -> str:
    return f"{element}[{','.join('N' if isinstance(n, str) else str(n) for n in shape)}] {name}"
