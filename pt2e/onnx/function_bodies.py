"""The ONNX functions of the nodes: bodies of standard operators that give the bits of pt2mx's operators.

ONNX has no operator for the bits of a float below opset 26. `_power` computes the power of two below a float in three
operations instead. Values are multiplied with powers of two and rounded by `Round`. All of it is exact. Opset 18 to 25.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from pt2mx.errors import MXError
from pt2mx.formats import ElementFormat
from pt2mx.kernels.elements import decode
from pt2mx.kernels.packing import group_of, is_packed, unpack
from pt2mx.modes import SCALE_MODES
from pt2mx.pt2e.onnx.function import Blocks, Function, Input, onnx
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX, MXNode
from pt2mx.spec import MXSpec

_TYPE = onnx.TensorProto
#: the largest float below 0.5: x plus it reaches the next whole number if the fraction of x is a half or more
_BELOW_HALF = 0.5 - 2.0**-25
#: adding and subtracting it rounds to a whole number, ties to even
_MAGIC = 1.5 * 2.0**23
#: the values of E8M0 bytes; the last one marks a block with an Inf or a NaN
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def fake_quantize(spec: MXSpec, opset: int, length: int = -1) -> Any:
    """Return the function that fake quantizes its input X, of any float dtype, to an output Y of the same dtype.

    Args:
        spec: a scale mode without a search, rounding to nearest, E8M0 scales; `axis` -1 or not negative.
        opset: the opset of the model, 18 to 25.
        length: the size along the axis; -1 where it is dynamic. A function for a known size is faster.

    Returns:
        The `FunctionProto`, with a name that other specs do not have.

    Raises:
        MXError: for another spec.
    """
    _check(spec)
    blocks, element = Blocks.of(spec, length), spec.element
    name = f"{FakeQuantizeMX.op_type}.{element}_{spec.scale_mode}_{spec.rounding}_{blocks.name}"
    f = Function(name, ["X"], [field.name for field in fields(FakeQuantizeMX)])
    x = f.op("Cast", "X", to=_TYPE.FLOAT)
    values = blocks.split(f, x)
    highest, lowest = (f.op(reduce, values, [blocks.inner]) for reduce in ("ReduceMax", "ReduceMin"))
    unit = unit_of(f, f.op("Max", highest, f.op("Neg", lowest)), spec)
    v = f.op("Div", values, unit)
    # the sum of a block with an Inf or a NaN is one of these, and times 0 it is NaN; of another block it is 0
    unit = f.op("Add", unit, f.op("Mul", f.op("ReduceSum", v, [blocks.inner]), 0.0))
    y = f.op("Mul", _round(f, v, spec), unit)
    f.op("CastLike", blocks.join(f, y, x), "X", output="Y")
    return f.proto(opset)


def dequantize(spec: MXSpec, opset: int, length: int = -1, dtype: int = _TYPE.FLOAT) -> Any:
    """Return the function that dequantizes codes, uint8, with scales, uint8, as pt2mx stores them.

    Args:
        spec: an element of at most 8 bits; `axis` -1 or not negative. Scale mode and rounding do not matter.
        opset: the opset of the model, 18 to 25.
        length: values along the axis; -1 for all codes that the bytes contain.
        dtype: the type of the values, a `TensorProto.DataType`.

    Returns:
        The `FunctionProto`, whose inputs are `codes` and `scale`, with a name that other specs do not have.

    Raises:
        MXError: for another element.
    """
    element, blocks = spec.element, Blocks.of(spec, length)
    if element.is_wide:
        raise MXError(f"codes of {element} take two bytes, which ONNX files do not hold: take an element of 8 bits")
    padded = is_packed(element.bits) and length % group_of(element.bits)[0] > 0 and length > 0
    name = f"{DequantizeMX.op_type}.{element}_{_TYPE.DataType.Name(dtype).lower()}_{blocks.name}"
    name += f"_of{length}" * padded
    f = Function(name, ["codes", "scale"], [field.name for field in fields(DequantizeMX)])
    x = _decode(f, "codes", element, blocks)
    if padded:  # drop the codes that fill the last group
        x = f.op("Slice", x, [0], [length], [spec.axis])
    scale = f.op("Gather", _POWERS, f.op("Cast", blocks.split_scale(f, "scale"), to=_TYPE.INT32))
    y = f.op("Mul", blocks.split(f, x), scale)
    f.op("Cast", blocks.join(f, y, x), output="Y", to=dtype)
    return f.proto(opset)


def body(node: MXNode, opset: int) -> Any:
    """Return the function for the attributes of a node."""
    if isinstance(node, DequantizeMX):
        return dequantize(node.spec, opset, node.length, node.dtype)
    return fake_quantize(node.spec, opset, node.length)


def add_bodies(model: Any) -> Any:
    """Add the functions of the nodes of the domain `pt2mx` to a model, one for each spec, and return the model."""
    opset = next(entry.version for entry in model.opset_import if entry.domain == "")
    functions = {function.name: function for function in model.functions if function.domain == DOMAIN}
    known: dict[MXNode, str] = {}
    for kind in (FakeQuantizeMX, DequantizeMX):
        for node, attributes in kind.nodes_in(model):
            if attributes not in known:
                function = body(attributes, opset)
                known[attributes] = function.name
                if function.name not in functions:
                    functions[function.name] = function
                    model.functions.append(function)
            node.op_type = known[attributes]
    if known and not any(entry.domain == DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    return model


def _check(spec: MXSpec) -> None:
    spec.op_args()  # E8M0
    if SCALE_MODES[spec.scale_mode].searches or spec.rounding not in _ROUNDINGS:
        scale_modes = ", ".join(mode for mode, rule in SCALE_MODES.items() if not rule.searches)
        raise MXError(
            f"{spec}: ONNX files hold the scale modes {scale_modes} and the roundings {', '.join(_ROUNDINGS)}; "
            "quantize activations with those"
        )


def _power(f: Function, x: str, factor: float = 1.0) -> str:
    """x: floats of at least 2**-126, with x and x * factor * 2**23 finite -> the power of two at or below each, times
    `factor`, a power of two. Smaller floats give at most the result of 2**-126.

    Source: Rump, Ogita, Oishi, "Accurate Floating-Point Summation, Part I" (2008), `ufp`.
    """
    q = f.op("Mul", x, (1 + 2.0**-23) * 2.0**23 * factor)
    return f.op("Sub", q, f.op("Mul", q, 1 - 2.0**-24))


def unit_of(f: Function, amax: str, spec: MXSpec) -> str:
    """amax: (..., blocks, 1, ...) -> the scale of each block; for integer elements, the value of a code's unit."""
    element = spec.element
    step = 2.0**-element.mantissa_bits if element.is_int else 1.0
    # the minimum replaces Inf, and numbers whose power would overflow; the factor 2**-23 is undone by 2**23 below
    power = _power(f, f.op("Min", amax, 1.5 * 2.0**127), 2.0**-23)
    unit = f.op("Max", f.op("Mul", power, 2.0 ** (23 - element.emax) * step), 2.0**-127 * step)
    threshold = SCALE_MODES[spec.scale_mode].threshold(element)
    if threshold == 2**23 - 1:  # never rounded up
        return unit
    highest = (1 + threshold * 2.0**-23) * 2.0**element.emax / step
    factor = f.op("Ceil", f.op("Div", f.op("Div", amax, unit), highest))  # 1 or 2; 0 for zeros
    return f.op("Clip", f.op("Mul", unit, factor), 2.0**-127 * step, 2.0**127 * step)


def _round(f: Function, v: str, spec: MXSpec) -> str:
    """v: values in units of `unit_of` -> the values of the element that they round to, saturated, in the same units."""
    element, to_whole = spec.element, _ROUNDINGS[spec.rounding]
    if element.is_int:
        step = 2.0**-element.mantissa_bits
        whole = v if spec.rounding == "even" else to_whole(f, v, v)
        whole = f.op("Clip", whole, element.lowest / step, element.max_normal / step)
        # two's complement has no negative zero: this makes it positive. Adding 0.0 would be optimized away
        return f.op("Sub", f.op("Add", whole, _MAGIC), _MAGIC)
    v = f.op("Clip", v, element.lowest, element.max_normal)
    quantum = _power(f, f.op("Abs", v), 2.0**-element.mantissa_bits)
    quantum = f.op("Max", quantum, 2.0 ** (element.emin - element.mantissa_bits))
    return f.op("Mul", to_whole(f, f.op("Div", v, quantum), v), quantum)


def _half_away(f: Function, units: str, v: str) -> str:
    """units: values in quanta -> whole numbers with the sign of v, also for -0. No quantum is below 2**-100."""
    whole = f.op("Floor", f.op("Add", f.op("Abs", units), _BELOW_HALF))
    return f.op("Mul", whole, f.op("Clip", f.op("Mul", v, 2.0**100), -1.0, 1.0))


def _half_up(f: Function, units: str, v: str) -> str:
    """Round as `_half_away`, with ties toward positive infinity."""
    below = f.op("Floor", units)
    above = f.op("GreaterOrEqual", f.op("Sub", units, below), 0.5)
    whole = f.op("Abs", f.op("Add", below, f.op("Cast", above, to=_TYPE.FLOAT)))
    return f.op("Mul", whole, f.op("Clip", f.op("Mul", v, 2.0**100), -1.0, 1.0))


#: rounding -> the operations that round values in quanta to whole numbers
_ROUNDINGS: dict[str, Callable[[Function, str, str], str]] = {
    "even": lambda f, units, v: f.op("Round", units),
    "half_away": _half_away,
    "half_up": _half_up,
}


def _decode(f: Function, codes: str, element: ElementFormat, blocks: Blocks) -> str:
    """codes: (..., bytes, ...) uint8 -> (..., codes, ...) float32. Each value is looked up in a table."""
    per_group, size = group_of(element.bits)
    codes = f.op("Cast", codes, to=_TYPE.INT32)
    groups = f.op("Div", blocks.size_along(f, codes), [size])
    if size == 1:  # one table for each code within a byte
        each = unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(1), 1, element.bits)  # (256, per_group)
        tables = decode(each, element).T.contiguous().numpy()
        values = [f.op("Gather", table, codes) for table in tables]
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
    return blocks.reshape(f, stacked, codes, f.op("Mul", groups, [per_group]))
