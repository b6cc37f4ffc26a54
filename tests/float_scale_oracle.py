"""Quantization with scales that have a significand, in fractions that are rounded where float32 rounds; independent of
the reference kernel, and slow."""

import math
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction

from mx_conformance.exact import floor_log2, grid, power_of_two, random_number, round_value
from pt2mx import ElementFormat, ScaleFormat

_TOP = Fraction(2) ** 128


def rounded(v: Fraction, mantissa_bits: int, emin: int) -> Fraction:
    """v to nearest, ties to even, in a float with that mantissa and smallest exponent."""
    binade = max(floor_log2(abs(v)), emin) if v else emin
    shift = mantissa_bits - binade  # the value in units of its last place, as a quotient of integers
    numerator, denominator = v.numerator << max(shift, 0), v.denominator << max(-shift, 0)
    quanta, rest = divmod(numerator, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and quanta % 2 == 1):
        quanta += 1
    return Fraction(quanta << max(-shift, 0), 1 << max(shift, 0))


def f32(v: Fraction) -> Fraction:
    return min(rounded(v, 23, -126), _TOP)  # Inf counts as 2**128


def scale_code(v: Fraction, scale: ScaleFormat) -> int:
    """The code of a scale, which ascends with its value: exponent and mantissa next to each other."""
    grid_ = scale.grid
    binade = max(floor_log2(v), 1 - grid_.bias) if v else 1 - grid_.bias
    quanta = v / power_of_two(binade - grid_.mantissa_bits)
    assert quanta.denominator == 1
    return ((binade + grid_.bias - 1) << grid_.mantissa_bits) + int(quanta)


def scale_value(code: int, scale: ScaleFormat) -> Fraction:
    m, bias = scale.grid.mantissa_bits, scale.grid.bias
    exponent, mantissa = code >> m, code & ((1 << m) - 1)
    significand = mantissa if exponent == 0 else mantissa + (1 << m)
    return Fraction(significand) * power_of_two(max(exponent, 1) - bias - m)


def applied(scale: Fraction, scale_format: ScaleFormat, t: Fraction) -> Fraction:
    """What multiplies the codes."""
    return f32({"": lambda: scale, "factor": lambda: scale * t, "divisor": lambda: scale / t}[scale_format.tensor]())


def in_units(scale: Fraction, scale_format: ScaleFormat, mode: str, t: Fraction) -> Callable[[Fraction], Fraction]:
    """The function that divides a value by its scale."""
    if mode != "nearest_reciprocal":
        divisor = applied(scale, scale_format, t)
        return lambda x: f32(x / divisor)
    reciprocal = {
        "": lambda: f32(1 / scale),
        "factor": lambda: f32(f32(1 / t) / scale),
        "divisor": lambda: f32(t / scale),
    }[scale_format.tensor]()
    return lambda x: f32(x * reciprocal)


def codes_of_scales(amax: Fraction, element: ElementFormat, f: ScaleFormat, mode: str, t: Fraction) -> list[int]:
    """The candidates for a block's scale, by their codes."""
    unit = power_of_two(2 - element.bits) if element.is_int else 1
    most, largest = Fraction(element.max_normal) / unit, Fraction(f.max_value)
    if f.tensor == "divisor":
        quotient = f32(f32(amax / most) * t)
    elif f.tensor == "factor":
        quotient = f32(f32(amax / most) / t) if mode == "nearest_reciprocal" else f32(amax / f32(most * t))
    else:
        quotient = f32(amax / most)
    factors = (1, Fraction(element.max_normal) / power_of_two(element.emax)) if mode == "four_six" else (1,)
    m, emin = f.grid.mantissa_bits, 1 - f.grid.bias
    least, codes = Fraction(f.min_value), []
    for factor in factors:
        q = f32(quotient * factor)
        if mode == "nearest_flush" and q <= least / 2:
            q = Fraction(1, 2**m)
        elif q == 0 and mode != "nearest_reciprocal":
            q = Fraction(1)
        q = max(q, power_of_two(emin) if mode == "nearest_reciprocal" else least)
        q = min(q, largest)
        code = scale_code(rounded(q, m, emin), f)
        codes.append(code + (mode == "rceil" and scale_value(code, f) < q))
    if mode == "mse":
        low, high = scale_code(least, f), scale_code(largest, f)
        codes += [max(low, min(high, codes[0] + offset)) for offset in (-1, 1)]
    return codes


def quantize_block(
    block: list[float],
    element: ElementFormat,
    f: ScaleFormat,
    mode: str,
    rounding: str = "even",
    t: float = 1.0,
    seed: int = 0,
    place: int = 0,
) -> tuple[int, list[int], list[float]]:
    """(code of the scale, codes, dequantized values as float32 holds them) of one block."""
    if not all(math.isfinite(x) for x in block):
        zero = element.values.index(0) if element.values else 0
        return f.nan, [zero] * len(block), [math.nan] * len(block)
    exact, tensor = [Fraction(x) for x in block], Fraction(t)
    unit = power_of_two(2 - element.bits) if element.is_int else Fraction(1)

    def values(code: int, rounding: str) -> list[tuple[Fraction, Fraction]]:
        """Each value in units of its scale, before and after it is rounded."""
        pairs, divided = [], in_units(scale_value(code, f), f, mode, tensor)
        for i, x in enumerate(exact):
            v = f32(divided(x) * unit)
            if rounding in ("up", "down") and abs(v) < power_of_two(-126) and x:
                v = power_of_two(-126) * (1 if x > 0 else -1)
            number = random_number(place + i, seed) if rounding == "stochastic" else None
            pairs.append((v, round_value(v, element, rounding, number)))
        return pairs

    codes = codes_of_scales(max(abs(x) for x in exact), element, f, mode, tensor)
    bits = min(28, (62 - (len(block) - 1).bit_length()) // 2)

    def error(code: int) -> int:
        ratio = f32(scale_value(code, f) / scale_value(codes[0], f))
        in_multiples = [
            f32(f32(abs(f32(v - p)) * ratio) * power_of_two(bits - element.emax - 1))
            for v, p in values(code, "even" if rounding == "stochastic" else rounding)
        ]
        return sum(min(round(e), 2**bits) ** 2 for e in in_multiples)

    code = min(codes, key=error)  # the first of equal ones
    factor, positive, stored, dequantized = applied(scale_value(code, f), f, tensor), grid(element), [], []
    for (_, p), given in zip(values(code, rounding), block, strict=True):
        negative = math.copysign(1, given) < 0
        if element.values:
            stored.append(element.values.index(float(p)))
            negative = p < 0
        elif element.is_int:
            stored.append(int(p / unit) % 2**element.bits)
            negative = negative and p != 0
        else:
            stored.append(bisect_left(positive, abs(p)) + (negative << (element.bits - 1)))
        value = f32(abs(p) / unit * factor)
        dequantized.append(math.copysign(math.inf if value == _TOP else float(value), -1 if negative else 1))
    return code, stored, dequantized
