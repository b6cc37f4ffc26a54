"""MX quantization in exact rational arithmetic, independent of the reference kernel; slow, one block at a time.

It follows the text of the OCP MX specification v1.0, section 6.3, with Python fractions instead of bit patterns.
"""

import math
from fractions import Fraction

from pt2mx import ElementFormat


def floor_log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def ceil_log2(x: Fraction) -> int:
    e = floor_log2(x)
    return e if Fraction(2) ** e == x else e + 1


def grid(element: ElementFormat) -> list[Fraction]:
    """The non-negative values of an element, ascending, listed from its definition."""
    if element.is_int:
        return [Fraction(i, 64) for i in range(128)]
    step = Fraction(1, 2**element.mantissa_bits)
    values = [i * step * Fraction(2) ** (1 - element.bias) for i in range(2**element.mantissa_bits)]
    for exponent in range(1, 2**element.exponent_bits):
        values += [(1 + i * step) * Fraction(2) ** (exponent - element.bias) for i in range(2**element.mantissa_bits)]
    return [v for v in values if v <= Fraction(element.max_normal)]


def exponent(amax: Fraction, element: ElementFormat, scale_mode: str) -> int:
    if amax == 0:
        return -127
    if scale_mode == "floor":
        e = floor_log2(amax) - element.emax
    elif scale_mode == "ceil":
        e = ceil_log2(amax) - element.emax
    elif scale_mode == "rceil":
        e = ceil_log2(amax / Fraction(element.max_normal))
    elif scale_mode == "even":
        half_ulp = Fraction(2) ** (floor_log2(amax) - element.mantissa_bits - 1)
        e = floor_log2(amax + half_ulp) - element.emax
    return max(-127, min(127, e))


def round_to_grid(v: Fraction, values: list[Fraction]) -> tuple[int, Fraction]:
    """Index and value of the nearest grid point of |v|, ties to the even index, saturated."""
    v = abs(v)
    if v >= values[-1]:
        return len(values) - 1, values[-1]
    low = max(i for i in range(len(values)) if values[i] <= v)
    below, above = v - values[low], values[low + 1] - v
    index = low if below < above or (below == above and low % 2 == 0) else low + 1
    return index, values[index]


def quantize_block(block: list[float], element: ElementFormat, scale_mode: str = "floor"):
    """(scale byte, codes, dequantized values in fp64) of one block of floats; NaN values and 0 codes where one of them
    is not finite."""
    if not all(math.isfinite(x) for x in block):
        return 0xFF, [0] * len(block), [math.nan] * len(block)
    exact = [Fraction(x) for x in block]
    e = exponent(max(abs(x) for x in exact), element, scale_mode)
    values, codes, dequantized = grid(element), [], []
    for x, given in zip(exact, block, strict=True):
        index, value = round_to_grid(x / Fraction(2) ** e, values)
        negative = math.copysign(1, given) < 0
        if element.is_int:
            codes.append(-index % 256 if negative else index)
            negative = negative and index != 0
        else:
            codes.append(index + (negative << (element.bits - 1)))
        dequantized.append(math.copysign(float(value * Fraction(2) ** e), -1 if negative else 1))
    return e + 127, codes, dequantized
