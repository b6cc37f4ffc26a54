"""The corners of quantization as blocks of few values: the first is the largest magnitude, the others are zeros.

All values are float32. An anchor is the power of two at which a block's scale is 1, by every scale rule but
"doubled", by which it is 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from mx_conformance.conventions import EVEN_OF
from mx_conformance.exact import grid
from mx_conformance.formats import ElementFormat

Block = Sequence[float]
_ULP, _BF16_ULP = 2.0**-23, 2.0**-7
_LARGEST = float(np.finfo(np.float32).max)


def _neighbours(v: float) -> tuple[float, float]:
    """Return the float32 values below and above a positive one."""
    x = np.float32(v)
    return float(np.nextafter(x, np.float32(0))), float(np.nextafter(x, np.float32(np.inf)))


def _anchored(element: ElementFormat, probes: Iterable[float]) -> list[Block]:
    """Return a block with the anchor for each probe and each sign."""
    return [(2.0**element.emax, sign * probe) for probe in probes for sign in (1, -1)]


def _parts(element: ElementFormat) -> tuple[list[float], list[float]]:
    """Return the positive values of the element below its smallest normal number, and the others. Integers have
    normal numbers alone."""
    values = [float(v) for v in grid(element)][1:]
    least = 0.0 if element.is_int else 2.0**element.emin
    return [v for v in values if v < least], [v for v in values if v >= least]


def _midpoints(values: Sequence[float]) -> list[float]:
    return [(low + high) / 2 for low, high in itertools.pairwise(values)]


def values(element: ElementFormat) -> list[Block]:
    """Return every normal number of the element, which quantizes to itself."""
    return _anchored(element, _parts(element)[1])


def subnormals(element: ElementFormat) -> list[Block]:
    """Return subnormal numbers of the element, what lies next to the ties among them, and what is below the least."""
    below, normal = _parts(element)
    if not below:
        return []
    near = [v for tie in _midpoints([0.0, *below, normal[0]]) for v in _neighbours(tie)]
    return _anchored(element, [*below, *near, below[0] / 4, 1e-30])


def ties(element: ElementFormat) -> list[Block]:
    """Return all midpoints of neighbours that are not beyond the largest value."""
    below, normal = _parts(element)
    return _anchored(element, _midpoints([0.0, *below, *normal]))


def near_ties(element: ElementFormat) -> list[Block]:
    """Return the float32 values below and above each midpoint of normal numbers, and such of bfloat16."""
    steps = [(1 - _BF16_ULP / 2), (1 + _BF16_ULP)]
    ties = _midpoints(_parts(element)[1])
    return _anchored(element, [v for tie in ties for v in (*_neighbours(tie), *(tie * step for step in steps))])


def saturation(element: ElementFormat) -> list[Block]:
    """Return values between the largest value of the element and the next power of two, with small values that show the
    scale."""
    top, largest = 2.0 ** (element.emax + 1), element.max_normal
    probes = [_neighbours(largest)[1], *(largest + (top - largest) * part for part in (0.25, 0.5, 0.875))]
    blocks = [_with_witnesses(element, probe / 2.0**element.emax, 0) for probe in probes]
    return [(sign * probe, *witnesses) for probe, *witnesses in blocks for sign in (1, -1)]


def scale_rule(element: ElementFormat) -> list[Block]:
    """Return largest magnitudes around the thresholds of all scale rules, with small values that show the scale."""
    # in units of 2**-23 above a power of two: a rule takes the next scale where amax is above, or reaches, one of them
    thresholds = {0, round((element.max_normal / 2.0**element.emax - 1) * 2**23)}
    if element.name == "fp4_e2m1":
        thresholds.add(round((7.25 / 4 - 1) * 2**23))  # "rceil_v2"
    thresholds.add(2**23 - 1 - 2 ** (22 - element.mantissa_bits))  # "even" of the element
    thresholds |= {2**23 - 2 ** (22 - bits) for bits in EVEN_OF}
    near = {threshold + step for threshold in thresholds for step in (-1, 0, 1)}
    mantissas = sorted(t for t in near if 0 <= t < 2**23 - 2)  # above is `powers_of_two`
    return [_with_witnesses(element, 1 + m * _ULP, k) for k in (-3, 0, 20) for m in mantissas]


def powers_of_two(element: ElementFormat) -> list[Block]:
    """Return every power of two that float32 holds as a normal number, and its neighbours."""
    shifts = range(-126 - element.emax, 128 - element.emax)
    each = [(1 - _ULP / 2, 1.0, 1 + _ULP)[i] for i in range(3)]
    return [_with_witnesses(element, v, k) for k in shifts for v in each if k > -126 - element.emax or v >= 1]


def largest_values(element: ElementFormat) -> list[Block]:
    """Return the largest value of the element times powers of two, and its neighbours."""
    significand = element.max_normal / 2.0**element.emax
    each = (*_neighbours(significand), significand)
    return [_with_witnesses(element, v, k) for k in range(-126 - element.emax, 128 - element.emax) for v in each]


def _with_witnesses(element: ElementFormat, amax: float, shift: int) -> Block:
    """Return amax * 2**(emax + shift) and small values that show the scale: the largest that loses no bits under the
    scale 2**shift, but does under twice that, and the same around it. For integers that is the least value."""
    edge = 2.0**-element.mantissa_bits if element.is_int else (2 - 2.0**-element.mantissa_bits) * 2.0**element.emin
    witnesses = [edge * 2.0 ** (shift + step) for step in (-1, 0, 1)]
    return amax * 2.0 ** (element.emax + shift), *(w for w in witnesses if w >= 2.0**-126)


def small_blocks(element: ElementFormat) -> list[Block]:
    """Return blocks around the least scale, 2**-127, and blocks of float32's subnormal numbers."""
    magnitudes = [2.0**-149, 3 * 2.0**-149, 2.0**-140, 2.0**-130, 1.5 * 2.0**-127, 2.0**-127, 2.0**-126]
    magnitudes += [*_neighbours(2.0**-126), 2.0**-125]
    magnitudes += [2.0 ** (element.emax + k) for k in (-128, -127, -126)]
    return [(sign * v, *(w for w in (v / 2, v / 4) if w >= 2.0**-149)) for v in magnitudes for sign in (1, -1)]


def large_blocks(element: ElementFormat) -> list[Block]:
    """Return blocks of the largest magnitudes that float32 holds."""
    return [(sign * v, v / 2, v / 8) for v in (2.0**126, 2.0**127, 1.5 * 2.0**127, _LARGEST) for sign in (1, -1)]


def random_values(element: ElementFormat) -> list[Block]:
    """Return blocks of 32 random values, of magnitudes from 2**-20 to 2**20."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((24, 32)) * 2.0 ** random.integers(-20, 20, (24, 1))
    return [tuple(row) for row in rows.astype(np.float32).astype(float).tolist()]


def rows_of(blocks: Sequence[Block], length: int = 32) -> np.ndarray:
    """Return blocks as rows (blocks, length) float32. The positions of values in a row vary from row to row."""
    rows = np.zeros((len(blocks), length), np.float32)
    for i, block in enumerate(blocks):
        # 7 and `length` have no common divisor, so positions differ
        rows[i, [(7 * i + (1 + i % 5 * 2) * j if len(block) < 6 else j) % length for j in range(len(block))]] = block
    return rows
