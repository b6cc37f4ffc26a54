"""Quantize to MX formats in exact fractions, one block at a time: slow, and independent of every kernel.

It follows the text of the OCP MX specification v1.0, section 6.3, and of the scale modes, with Python fractions instead
of bit patterns. `check` compares implementations with it, and the tests of pt2mx its kernels.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from fractions import Fraction

from mx_conformance.formats import ElementFormat

#: Philox-4x32-10 as Salmon et al. (SC 2011) define it, in Python integers
_MULTIPLIERS, _KEY_STEPS, _WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF


def philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & _WORD,
            (first >> 32) ^ counter[3] ^ key[1],
            first & _WORD,
        ]
        key = [(k + step) & _WORD for k, step in zip(key, _KEY_STEPS, strict=True)]
    return counter


def random_number(index: int, seed: int) -> Fraction:
    """Return the number in [0, 1) that stochastic rounding draws for the value at `index` of a tensor."""
    block = index // 4
    words = philox([block & _WORD, block >> 32, 0, 0], [seed & _WORD, seed >> 32])
    return Fraction(words[index % 4] >> 1, 2**31)


@functools.cache
def power_of_two(e: int) -> Fraction:
    return Fraction(2) ** e


def floor_log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    # integers are compared several times faster than fractions
    is_at_least = x.denominator << max(e, 0) <= x.numerator << max(-e, 0)
    return e if is_at_least else e - 1


def ceil_log2(x: Fraction) -> int:
    e = floor_log2(x)
    return e if power_of_two(e) == x else e + 1


@functools.cache
def grid(element: ElementFormat) -> list[Fraction]:
    """Return the non-negative values of an element, ascending, from its definition."""
    if element.values:
        return sorted(Fraction(v) for v in element.values if v >= 0)
    if element.is_int:
        values = [Fraction(i, 2 ** (element.bits - 2)) for i in range(2 ** (element.bits - 1))]
        return [v for v in values if v <= Fraction(element.max_normal)]
    step = Fraction(1, 2**element.mantissa_bits)
    values = [i * step * power_of_two(1 - element.bias) for i in range(2**element.mantissa_bits)]
    for exponent in range(1, 2**element.exponent_bits):
        values += [(1 + i * step) * power_of_two(exponent - element.bias) for i in range(2**element.mantissa_bits)]
    return [v for v in values if v <= Fraction(element.max_normal)]


@functools.cache
def code_values(element: ElementFormat) -> tuple[float, ...]:
    """Return the value of every code of an element of at most 8 bits, in the order of codes; -0.0, Inf and NaN too."""
    half = 2 ** (element.bits - 1)
    if element.values:
        return element.values + (math.nan,) * (2 * half - len(element.values))
    if element.is_int:
        return tuple((code - 2 * half if code >= half else code) / 2 ** (element.bits - 2) for code in range(2 * half))
    values = [float(v) for v in grid(element)]
    special = [math.inf] if element.has_inf else []
    values += (special + [math.nan] * half)[: half - len(values)]
    return tuple(values + [-v for v in values])


def quantum(v: Fraction, element: ElementFormat) -> Fraction:
    """Return the distance of the element's values around v, as if there were no largest value."""
    smallest = 0 if element.is_int else 1 - element.bias
    binade = max(floor_log2(v), smallest) if v else smallest
    return power_of_two(binade - (element.bits - 2 if element.is_int else element.mantissa_bits))


_HALF = Fraction(1, 2)
#: rounding -> (the part above the number of quanta below, in [0, 1); that number; v > 0) -> True to round up
ROUNDINGS: dict[str, Callable[[Fraction, int, bool], bool]] = {
    "even": lambda above, below, positive: above > _HALF or (above == _HALF and below % 2 == 1),
    "half_away": lambda above, below, positive: above > _HALF or (above == _HALF and positive),
    "half_toward_zero": lambda above, below, positive: above > _HALF or (above == _HALF and not positive),
    "half_up": lambda above, below, positive: above >= _HALF,
    "toward_zero": lambda above, below, positive: above > 0 and not positive,
    "up": lambda above, below, positive: above > 0,
    "down": lambda above, below, positive: False,
}


def round_value(v: Fraction, element: ElementFormat, rounding: str, number: Fraction | None = None) -> Fraction:
    """Round v to a value of the element, saturated."""
    if element.values:
        return _round_in_codebook(v, element, rounding, number)
    step = quantum(abs(v), element)
    quanta = v / step
    if number is not None:  # stochastic
        below = math.floor(abs(quanta))
        away = number < Fraction(math.floor((abs(quanta) - below) * 2**31), 2**31)
        rounded = (below + away) * (1 if v > 0 else -1)
    else:
        below = math.floor(quanta)
        rounded = below + ROUNDINGS[rounding](quanta - below, below, v > 0)
    largest = grid(element)[-1]
    lowest = -Fraction(2) if element.full_range else -largest
    return max(lowest, min(largest, step * rounded))


def _round_in_codebook(v: Fraction, element: ElementFormat, rounding: str, number: Fraction | None) -> Fraction:
    """Round v to a value of a codebook; a rounding counts its values from 0."""
    values = sorted(map(Fraction, element.values))
    v = max(values[0], min(values[-1], v))
    at = min(bisect_right(values, v), len(values) - 1)
    low, high, below = values[at - 1], values[at], at - 1 - values.index(Fraction(0))
    above = (v - low) / (high - low)
    if above == 1:
        return high
    if number is not None:
        magnitude = above if v > 0 else 1 - above
        away = number < Fraction(math.floor(magnitude * 2**31), 2**31)
        return high if away == (v > 0) else low
    return high if ROUNDINGS[rounding](above, below, v > 0) else low


def exponent(block: list[Fraction], element: ElementFormat, scale_mode: str, rounding: str, scale_exp_bits: int) -> int:
    """Return the shared exponent of a block, clamped to its width.

    The scale mode "even_mN" is "even" of an element with N mantissa bits."""
    limit = 2 ** (scale_exp_bits - 1) - 1
    amax = max(abs(x) for x in block)
    if amax == 0:
        return -limit
    if scale_mode == "ceil":
        e = ceil_log2(amax) - element.emax
    elif scale_mode == "rceil":
        e = ceil_log2(amax / Fraction(element.max_normal))
    elif scale_mode == "rceil_v2":
        e = ceil_log2(amax / Fraction(29, 4))
    elif scale_mode.startswith("even"):
        mantissa_bits = int(scale_mode.removeprefix("even").removeprefix("_m") or element.mantissa_bits)
        half_ulp = power_of_two(floor_log2(amax) - mantissa_bits - 1)
        e = floor_log2(amax + half_ulp) - element.emax
    else:
        e = floor_log2(amax) - element.emax + (scale_mode == "doubled")
    e = max(-limit, min(limit, e))
    if scale_mode == "mse":
        candidates = [max(-limit, min(limit, e + change)) for change in (0, -1, 1)]
        e = min(candidates, key=lambda c: _measured_error(block, c, e, element, rounding))  # the first of equal ones
    return e


def _measured_error(block: list[Fraction], candidate: int, e: int, element: ElementFormat, rounding: str) -> int:
    """Return the sum of squared errors, each measured to `bits` bits of twice the largest power of two at exponent
    e."""
    bits = min(28, (62 - (len(block) - 1).bit_length()) // 2)
    unit = power_of_two(e + element.emax + 1 - bits)
    total = 0
    for x in block:
        scale = power_of_two(candidate)
        error = abs(x - scale * round_value(x / scale, element, "even" if rounding == "stochastic" else rounding))
        total += min(round(error / unit), 2**bits) ** 2  # Python rounds a Fraction to nearest, ties to even
    return total


def quantize_block(
    block: list[float],
    element: ElementFormat,
    scale_mode: str = "floor",
    rounding: str = "even",
    seed: int = 0,
    index: int = 0,
    scale_exp_bits: int = 8,
    shared_exponent: int | None = None,
) -> tuple[int, list[int], list[float]]:
    """Return (scale byte, codes, dequantized values in fp64) of one block of floats that begins at `index` of its
    tensor; NaN values and the code of 0 if one of them is not finite. `shared_exponent` takes the place of the one that
    the scale mode gives."""
    if not all(math.isfinite(x) for x in block):
        zero = element.values.index(0) if element.values else 0
        return 0xFF, [zero] * len(block), [math.nan] * len(block)
    exact = [Fraction(x) for x in block]
    e = shared_exponent
    if e is None:
        e = exponent(exact, element, scale_mode, rounding, scale_exp_bits)
    values, codes, dequantized = grid(element), [], []
    for i, (x, given) in enumerate(zip(exact, block, strict=True)):
        number = random_number(index + i, seed) if rounding == "stochastic" else None
        value = round_value(x / power_of_two(e), element, rounding, number)
        negative = math.copysign(1, given) < 0
        if element.values:
            codes.append(element.values.index(float(value)))
            negative = value < 0
        elif element.is_int:
            codes.append(int(value * 2 ** (element.bits - 2)) % 2**element.bits)
            negative = negative and value != 0
        else:
            codes.append(bisect_left(values, abs(value)) + (negative << (element.bits - 1)))
        dequantized.append(math.copysign(float(abs(value) * power_of_two(e)), -1 if negative else 1))
    return e + 127, codes, dequantized
