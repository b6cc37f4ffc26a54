"""The ONNX functions of the nodes: bodies of standard operators that give the bits of pt2mx's operators.

ONNX has no operator for the bits of a float below opset 26. `_power` computes the power of two below a float in three
operations instead. Values are multiplied with powers of two and rounded by `Round`. All of it is exact. Opset 18 to 25.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pt2mx.errors import MXError
from pt2mx.formats import ElementFormat
from pt2mx.kernels.elements import decode
from pt2mx.kernels.packing import group_of, is_packed, unpack
from pt2mx.modes import scale_modes
from pt2mx.pt2e.onnx.block_scales import (
    block_scale,
    has_function,
    in_units,
    stored_scale,
    tensor_scale,
    times_tensor_scale,
    unit_of,
)
from pt2mx.pt2e.onnx.files import TensorType, import_domain, known_types, opset_of
from pt2mx.pt2e.onnx.function import Blocks, Function, Input, Shape, onnx
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX, MXNode
from pt2mx.pt2e.onnx.rounding import ROUNDINGS, round_to_element
from pt2mx.spec import MXSpec

_TYPE = onnx.TensorProto
#: ONNX's own types of scales
NATIVE_SCALES = (_TYPE.FLOAT8E8M0, _TYPE.FLOAT8E4M3FN)
#: the domain of onnxruntime's own operators
MICROSOFT = "com.microsoft"


def fake_quantize(
    spec: MXSpec, opset: int, length: int = -1, static: bool = False, shape: Shape = None, dtype: int = 0
) -> Any:
    """Return the function that fake quantizes its input X, of any float dtype, to an output Y of the same dtype.

    Functions of other arguments have other names. What is known of the shape of X makes a function, or the start of its
    session, faster.

    Args:
        spec: a scale mode without a search, rounding to nearest, blocks of one row; `axis` -1 or not negative.
        opset: the opset of the model, 18 to 25.
        length: the size along the axis; -1 where it is dynamic.
        static: True for a second input, the float32 scale of the tensor, of formats with one; otherwise it is X's own.
        shape, dtype: those of X, None for an unknown size or rank; 0 for any `TensorProto.DataType`.
    """
    _check(spec)
    blocks, element, casts = Blocks.of(spec, length, shape), spec.element, dtype != _TYPE.FLOAT
    name = f"{FakeQuantizeMX.op_type}.{element}_{scales_name(spec)}{spec.scale_mode}_{spec.rounding}_{blocks.name}"
    name += "" if casts else "_float"
    inputs = ["X", "tensor_scale"] if static else ["X"]
    f = Function(name + "_static" * static, inputs, list(FakeQuantizeMX.names))
    x = f.op("Cast", "X", to=_TYPE.FLOAT) if casts else "X"
    values = blocks.split(f, x)
    if not spec.has_power_of_two_scale:
        t = tensor_scale(f, x, spec, inputs[-1] if static else "") if spec.has_tensor_scale else 1.0
        scale, unit = float_scales(f, values, blocks, spec, t)
        v = in_units(f, values, scale, spec, t)
    else:
        v, unit = in_powers_of_two(f, values, blocks, spec)
    y = f.op("Mul", round_to_element(f, v, element, spec.rounding), unit)
    if casts:
        f.op("CastLike", blocks.join(f, y, x), "X", output="Y")
    else:
        blocks.join(f, y, x, output="Y")
    return f.proto(opset)


def in_powers_of_two(f: Function, values: str, blocks: Blocks, spec: MXSpec) -> tuple[str, str]:
    """values: (..., blocks, block, ...) -> the values in units of their block, and the units, (..., blocks, 1, ...),
    NaN for a block with an Inf or a NaN."""
    unit = unit_of(f, f.op("ReduceMax", f.op("Abs", values), [blocks.inner]), spec)
    v = f.op("Div", values, unit)
    # the sum of a block with an Inf or a NaN is one of these, and times 0 it is NaN; of another block it is 0
    return v, f.op("Add", unit, f.op("Mul", f.op("ReduceSum", v, [blocks.inner]), 0.0))


def float_scales(f: Function, values: str, blocks: Blocks, spec: MXSpec, t: Input) -> tuple[str, str]:
    """values: (..., blocks, block, ...) -> the scales of the blocks, with a significand, and what multiplies codes, NaN
    for a block with an Inf or a NaN; both (..., blocks, 1, ...)."""
    scale = block_scale(f, f.op("ReduceMax", f.op("Abs", values), [blocks.inner]), spec, t)
    unit = times_tensor_scale(f, scale, spec, t)
    # an Inf or a NaN times 0 is NaN
    return scale, f.op("Add", unit, f.op("ReduceSum", f.op("Mul", values, 0.0), [blocks.inner]))


def dequantize(
    spec: MXSpec,
    opset: int,
    length: int = -1,
    dtype: int = _TYPE.FLOAT,
    shape: Shape = None,
    types: tuple[int | None, ...] = (),
) -> Any:
    """Return the function that dequantizes `codes`, uint8, with `scale`, as pt2mx stores them, and for formats with a
    scale a tensor with `tensor_scale`. Codes and scales can have ONNX's own types for them.

    Args:
        spec: an element of at most 8 bits; `axis` -1 or not negative, -1 for blocks of several rows. Scale mode and
            rounding do not matter.
        opset: the opset of the model, 18 to 25.
        length: values along the axis; -1 for all codes that the bytes contain.
        dtype, shape: the `TensorProto.DataType` of the values; the shape of the codes, None for what is unknown.
        types: the types of codes and scales, None for uint8 and the type of the format.
    """
    codes_type, scale_type = (*types, None, None)[:2]
    element, blocks = spec.element, Blocks.of(spec, length, None if spec.block_rows > 1 else shape)
    spec.check_built_in("ONNX files")
    if element.is_wide:
        raise MXError(f"codes of {element} take two bytes, which ONNX files do not hold: take an element of 8 bits")
    if spec.block_rows > 1 and spec.axis != -1:
        raise MXError(f"{spec}: ONNX files hold blocks of several rows along the last dimension only, not {spec.axis}")
    is_native, is_native_scale = codes_type not in (None, _TYPE.UINT8), scale_type in NATIVE_SCALES
    padded = not is_native and is_packed(element.bits) and length % group_of(element.bits)[0] > 0 and length > 0
    name = f"{DequantizeMX.op_type}.{element}_{scales_name(spec)}{_TYPE.DataType.Name(dtype).lower()}_{blocks.name}"
    name += f"_of{length}" * padded + "_native" * is_native + "_native_scale" * is_native_scale
    inputs = ["codes", "scale", *["tensor_scale"] * spec.has_tensor_scale]
    f = Function(name, inputs, list(DequantizeMX.names))
    scale = stored_scale(f, "scale", spec, is_native_scale)
    if not spec.has_power_of_two_scale:
        t = f.op("Reshape", "tensor_scale", [1]) if spec.has_tensor_scale else 1.0
        scale = times_tensor_scale(f, scale, spec, t)
    last = "Y" if dtype == _TYPE.FLOAT else ""
    if codes_type == _TYPE.FLOAT4E2M1:
        y = _gather_all(f, scale, spec, last)
    else:
        x = f.op("Cast", "codes", to=_TYPE.FLOAT) if is_native else _decode(f, "codes", element, blocks)
        if padded:  # drop the codes that fill the last group
            x = f.op("Slice", x, [0], [length], [spec.axis])
        values = blocks.split(f, x)
        if spec.block_rows > 1:
            rows = f.op("Range", np.asarray(0), f.op("Squeeze", f.op("Shape", x, start=-2, end=-1)), np.asarray(1))
            scale = f.op("Gather", scale, f.op("Div", rows, [spec.block_rows]), axis=-2)
        if not spec.has_power_of_two_scale and element.unit != 1:
            values = f.op("Mul", values, 1 / element.unit)
        y = blocks.join(f, f.op("Mul", values, blocks.split_scale(f, scale)), x, output=last)
    if y != "Y":
        f.op("Cast", y, output="Y", to=dtype)
    return f.proto(opset)


def _gather_all(f: Function, scale: str, spec: MXSpec, output: str) -> str:
    """Return the values of FLOAT4E2M1 codes by the only operator that onnxruntime has for them on the CPU."""
    count = f.op("Squeeze", f.op("Shape", "codes", start=0, end=1))
    rows = f.op("Range", np.asarray(0), count, np.asarray(1))
    blocks = {"gather_axis": 0, "quantize_axis": spec.axis, "block_size": spec.block_size}
    return f.op("GatherBlockQuantized", "codes", rows, scale, output=output, domain=MICROSOFT, **blocks)


def body(
    node: MXNode, opset: int, static: bool = False, shape: Shape = None, types: tuple[int | None, ...] = (None,)
) -> Any:
    """Return the function of a node, whose inputs have these types, and the first one this shape; `static`: a
    `FakeQuantizeMX` with a tensor scale as input."""
    if isinstance(node, DequantizeMX):
        return dequantize(node.spec, opset, node.length, node.dtype, shape, types)
    return fake_quantize(node.spec, opset, node.length, static, shape, types[0] or 0)


def add_bodies(model: Any) -> Any:
    """Add the functions of the nodes of the domain `pt2mx` to a model, one for each spec, and return the model."""
    opset = opset_of(model)
    functions = {function.name: function for function in model.functions if function.domain == DOMAIN}
    known: dict[tuple[object, ...], str] = {}
    types = known_types(model)
    for kind in (FakeQuantizeMX, DequantizeMX):
        for node, attributes in kind.nodes_in(model):
            static = kind is FakeQuantizeMX and len(node.input) > 1
            inputs = [types.get(name, TensorType()) for name in node.input]
            key = attributes, static, inputs[0].shape, tuple(value.dtype for value in inputs)
            if key not in known:
                function = body(attributes, opset, *key[1:])
                known[key] = function.name
                if function.name not in functions:
                    functions[function.name] = function
                    model.functions.append(function)
                    for entry in function.opset_import:
                        import_domain(model, entry.domain, entry.version)
            node.op_type = known[key]
    if known:
        import_domain(model, DOMAIN, VERSION)
    return model


def _check(spec: MXSpec) -> None:
    spec.check_built_in("ONNX files")
    spec.check_operators()
    if spec.block_rows > 1:
        raise MXError(f"{spec}: ONNX files hold activations in blocks of one row; quantize activations with those")
    if not has_function(spec) or spec.rounding not in ROUNDINGS:
        known = scale_modes(spec.scale_format, spec.element)
        modes = [mode for mode in known if has_function(spec.replace(scale_mode=mode))]
        raise MXError(
            f"{spec}: ONNX files hold the scale modes {', '.join(modes)} and the roundings {', '.join(ROUNDINGS)}; "
            "quantize activations with those"
        )


def scales_name(spec: MXSpec) -> str:
    """Return the part of a function's name that says the scale format, empty for E8M0 of one row."""
    rows = "" if spec.block_rows == 1 else f"rows{spec.block_rows}_"
    return rows if spec.has_power_of_two_scale else f"{spec.scale_format}_{rows}"


def _decode(f: Function, codes: str, element: ElementFormat, blocks: Blocks) -> str:
    """codes: (..., bytes, ...) uint8 -> (..., codes, ...) float32. Each value is looked up in a table."""
    per_group, size = group_of(element.bits)
    codes = f.op("Cast", codes, to=_TYPE.INT32)
    count_of = -(-blocks.length // per_group)
    groups: Input = [count_of] if blocks.has_shape else f.op("Div", blocks.size_along(f, codes), [size])
    total: Input = [count_of * per_group] if blocks.has_shape else ""
    if size == 1:  # tables for a byte
        bytes_ = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
        tables = decode(unpack(bytes_, 1, element.bits), element).numpy()  # (256, per_group)
        if per_group > 1 and blocks.has_shape:
            rows = f.op("Gather", tables, codes)  # (..., bytes, ..., per_group)
            if blocks.behind:
                rows = f.op("Transpose", rows, perm=blocks.last_to_inner)
            return blocks.reshape(f, rows, codes, total)
        values = [f.op("Gather", table, codes) for table in tables.T.copy()]
    else:
        grouped = blocks.reshape(f, codes, codes, groups, [size])
        word: Input = np.zeros((), np.int32)
        for i in range(size):
            byte = f.op("Gather", grouped, np.asarray(i), axis=blocks.inner)
            word = f.op("Add", word, f.op("Mul", byte, np.asarray(1 << 8 * i, np.int32)))
        count = 1 << element.bits
        table = decode(torch.arange(count, dtype=torch.int32), element).numpy()
        higher = [f.op("Div", word, np.asarray(count**j, np.int32)) for j in range(per_group)]
        values = [f.op("Gather", table, f.op("Mod", word, np.asarray(count, np.int32))) for word in higher]
    if per_group == 1:
        return values[0]
    stacked = f.op("Concat", *(f.op("Unsqueeze", value, [blocks.inner]) for value in values), axis=blocks.inner)
    return blocks.reshape(f, stacked, codes, total or f.op("Mul", groups, [per_group]))
