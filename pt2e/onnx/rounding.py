"""Rounding in ONNX functions: to the values of an element, without the bits of a float."""

from __future__ import annotations

from collections.abc import Callable

from pt2mx.formats import ElementFormat
from pt2mx.pt2e.onnx.function import Function, onnx

_TYPE = onnx.TensorProto
#: the largest float below 0.5: x plus it reaches the next whole number if the fraction of x is a half or more
_BELOW_HALF = 0.5 - 2.0**-25


def power_below(f: Function, x: str, factor: float = 1.0) -> str:
    """x: floats of at least 2**-126, with x and x * factor * 2**23 finite -> the power of two at or below each, times
    `factor`, a power of two. Smaller floats give at most the result of 2**-126.

    Source: Rump, Ogita, Oishi, "Accurate Floating-Point Summation, Part I" (2008), `ufp`.
    """
    return ulp_of(f, f.op("Mul", x, (1 + 2.0**-23) * 2.0**23 * factor))


def ulp_of(f: Function, q: str) -> str:
    """q: floats of at least 2**-126 -> 2**-23 times the largest power of two below each. Smaller ones give at most the
    result of 2**-126."""
    return f.op("Sub", q, f.op("Mul", q, 1 - 2.0**-24))


def round_to_element(f: Function, v: str, element: ElementFormat, rounding: str) -> str:
    """v: values in units of their block -> the values of the element that they round to, saturated, in the same
    units."""
    to_whole = _TO_WHOLE[rounding]
    if element.is_int:
        step = 2.0**-element.mantissa_bits
        whole = f.op("Clip", to_whole(f, v, v), element.lowest / step, element.max_normal / step)
        # two's complement has no negative zero: this makes it positive. Adding 0.0 would be optimized away
        return f.op("Cast", f.op("Cast", whole, to=_TYPE.INT32), to=_TYPE.FLOAT)
    v = f.op("Clip", v, element.lowest, element.max_normal)
    quantum = power_below(f, f.op("Abs", v), 2.0**-element.mantissa_bits)
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
ROUNDINGS: dict[str, Callable[[Function, str, str], str]] = {
    "even": lambda f, units, v: f.op("Round", units),
    "half_away": _half_away,
    "half_up": _half_up,
}
_TO_WHOLE = {**ROUNDINGS, "up": lambda f, units, v: f.op("Ceil", units)}
