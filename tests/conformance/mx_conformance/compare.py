"""Compare results with exact arithmetic, and describe the smallest failing input."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mx_conformance.conventions import Claim
from mx_conformance.exact import quantize_block
from mx_conformance.formats import ELEMENTS
from mx_conformance.subject import BLOCK, Output

#: at this magnitude float32 overflows: the specification leaves open what becomes of such values (section 5.1)
_OVERFLOW = 2.0**128
_LARGEST_SCALE = 254  # a byte; 255 is NaN


@dataclass(frozen=True)
class Mismatches:
    """The values and scale bytes that differ.

    Args:
        values: (rows, n) bool, where a value does.
        scale: (rows, blocks) bool, where a scale byte does.
        want, want_scale: what is expected there.
    """

    values: NDArray[np.bool_]
    scale: NDArray[np.bool_]
    want: NDArray[np.float64]
    want_scale: NDArray[np.int64]

    @property
    def rows(self) -> NDArray[np.bool_]:
        """(rows,) bool, where anything differs."""
        return np.asarray(self.values.any(1) | self.scale.any(1))

    def of(self, rows: NDArray[np.bool_]) -> Mismatches:
        """Return those of some rows, (rows,) bool."""
        return dataclasses.replace(self, values=self.values & rows[:, None], scale=self.scale & rows[:, None])

    @property
    def count(self) -> int:
        """The number of values and scale bytes that differ."""
        return int(self.values.sum() + self.scale.sum())


def expected(x: NDArray[np.float32], claim: Claim) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the dequantized values (rows, n) and scale bytes (rows, blocks) of rows, in exact arithmetic; the byte of
    a block of zeros is 0."""
    want = np.zeros(x.shape)
    scale = np.zeros((len(x), -(-x.shape[1] // BLOCK)), np.int64)
    for i, row in enumerate(x.astype(np.float64)):
        for block in range(scale.shape[1]):
            part = row[block * BLOCK : (block + 1) * BLOCK]
            used = np.flatnonzero(part)
            if len(used):
                conventions = claim.target.name, str(claim.scale_mode), str(claim.rounding)
                scale[i, block], want[i, block * BLOCK + used] = _exact(tuple(part[used].tolist()), *conventions)
    return want, scale


@functools.lru_cache(1 << 17)
def _exact(
    block: tuple[float, ...], element: str, scale_mode: str, rounding: str, exponent: int | None = None
) -> tuple[int, list[float]]:
    scale, _, values = quantize_block(list(block), ELEMENTS[element], scale_mode, rounding, shared_exponent=exponent)
    return scale, values


def compare(
    output: Output, x: NDArray[np.float32], claim: Claim, with_scale: bool = False, overflow: bool = False
) -> Mismatches:
    """Compare the results of rows with exact arithmetic.

    Args:
        output: what the implementation returned.
        x: (rows, n), the rows.
        claim: the conventions to expect.
        with_scale: also compare scale bytes, but those of blocks of zeros.
        overflow: accept Inf and NaN where a value is beyond the largest of the element, whose scale is 1.
    """
    want, want_scale = expected(x, claim)
    differs = different(output.values, want)
    if overflow:
        differs &= np.isfinite(output.values) | (np.abs(x) <= claim.target.max_normal)
    scale = np.zeros(want_scale.shape, bool)
    if with_scale and output.scale is not None:
        starts = np.arange(0, x.shape[1], BLOCK)
        scale = (output.scale != want_scale) & np.logical_or.reduceat(x != 0, starts, axis=1)
    return Mismatches(differs, scale, want, want_scale)


def under_other_scales(
    output: Output, x: NDArray[np.float32], claim: Claim, mismatches: Mismatches
) -> NDArray[np.bool_]:
    """Return which rows (rows,) differ in their scales alone: each value is what its block's scale makes of it.

    Section 6.3 leaves the scale to the implementation. It is the scale byte; without one, any up to a binade from
    floor's will do."""
    rows = mismatches.rows
    for i in np.flatnonzero(rows):
        for block, start in enumerate(range(0, x.shape[1], BLOCK)):
            part, got = x[i, start : start + BLOCK].astype(np.float64), output.values[i, start : start + BLOCK]
            rows[i] &= _fits_a_scale(part, got, claim, None if output.scale is None else int(output.scale[i, block]))
    return rows


def _fits_a_scale(part: NDArray[np.float64], got: NDArray[np.float64], claim: Claim, scale: int | None) -> bool:
    used = np.flatnonzero(part)
    if not len(used):
        return not got.any()
    block, element = tuple(part[used].tolist()), claim.target.name
    if scale is None:
        floor, _ = _exact(block, element, "floor", str(claim.rounding))
        scales = [floor, max(floor - 1, 0), min(floor + 1, _LARGEST_SCALE)]
    else:
        scales = [scale] if scale <= _LARGEST_SCALE else []
    want = np.zeros((len(scales), len(part)))
    for row, byte in zip(want, scales, strict=True):
        row[used] = _exact(block, element, "", str(claim.rounding), byte - 127)[1]
    return not different(got, want).any(1).all()


def different(got: NDArray[np.float64], want: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where values differ. NaN equals NaN, -0 equals 0, and what float32 cannot hold equals anything."""
    equal = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(want) >= _OVERFLOW)
    return ~equal


def simplest(x: NDArray[np.float32], mismatches: Mismatches) -> int:
    """Return the failing row whose largest magnitude is nearest to 1, then the one with the smallest other values, then
    a positive one. Full blocks come last."""

    def key(i: int) -> tuple[float, ...]:
        magnitudes = np.abs(x[i].astype(np.float64))
        distance, total = abs(np.log2(magnitudes.max())), magnitudes.sum()
        return float(np.count_nonzero(magnitudes) > 4), float(distance), float(total), -float(x[i].min())

    return min(map(int, np.flatnonzero(mismatches.rows)), key=key)


def example(output: Output, x: NDArray[np.float32], mismatches: Mismatches) -> str:
    """Describe the simplest failing row."""
    i = simplest(x, mismatches)
    block = [value for value in x[i] if value != 0]
    block.sort(key=abs, reverse=True)
    given = f"[{', '.join(map(text_of, block[:4]))}{', ...' if len(block) > 4 else ''}]"
    if not mismatches.scale[i].any():
        j = int(np.flatnonzero(mismatches.values[i])[0])
        wrong, want = output.values[i, j], mismatches.want[i, j]
        return f"{given}: {text_of(x[i, j])} became {text_of(wrong)}, expected {text_of(want)}"
    j = int(np.flatnonzero(mismatches.scale[i])[0])
    byte = None if output.scale is None else output.scale[i, j]
    return f"{given}: scale byte {byte}, expected {mismatches.want_scale[i, j]}"


def text_of(value: Any) -> str:
    """Return a float32 value in the fewest digits that identify it."""
    return str(np.float32(value))
