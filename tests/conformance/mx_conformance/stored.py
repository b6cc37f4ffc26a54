"""Codes and scale bytes: their order in memory, and what `dequantize` makes of each."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from mx_conformance.compare import different, text_of
from mx_conformance.conventions import CHOICES, PACKINGS, Claim, packings
from mx_conformance.examine import Examination, raised
from mx_conformance.result import Row
from mx_conformance.subject import BLOCK, decode

_ONE, _NAN = 127, 255  # scale bytes
_SCALES = (0, 1, 2, 64, 126, 128, 190, 253, 254)


def encoded(codes: NDArray[np.uint8], claim: Claim) -> NDArray[np.uint8]:
    """Return codes (rows, n) in bytes, in the claimed packing."""
    return PACKINGS[claim.packing or "low_first"].pack(codes, claim.element.bits)


def all_codes(claim: Claim) -> NDArray[np.uint8]:
    """Return every code, as rows of blocks (rows, 32); the codes of narrow elements several times."""
    return np.resize(np.arange(2**claim.element.bits, dtype=np.uint8), (max(2**claim.element.bits // BLOCK, 1), BLOCK))


def decide_packing(examination: Examination) -> None:
    """Find the packing of what `quantize` returns, before other corners read it, and add the row.

    The values are powers of two, which every scale rule and rounding keeps; but half of floor's scale saturates the
    first of a block, the largest."""
    element = examination.claim.element
    random, least = np.random.default_rng(0), min(int(element.emin), element.emax - 1)
    x = random.choice([-1, 0, 1], (8, BLOCK)) * 2.0 ** random.integers(least, element.emax, (8, BLOCK))
    x[:, 0] = 2.0**element.emax
    output = examination.subject.run(x.astype(np.float32), examination.followed)
    scale, data = output.scale, output.data
    if scale is None or data is None or element.bits == 8:
        return
    wrong = {}
    for name in packings(element):
        if (name == "bytes") == (data.shape[1] == BLOCK):
            values = decode(scale, data, dataclasses.replace(examination.followed, packing=name), BLOCK)
            wrong[name] = different(values, x) & (np.arange(BLOCK) > 0)
    _decide(examination, wrong, x)


def run(examination: Examination) -> None:
    """Compare `dequantize` with the tables of the specification: every code under the scales that matter."""
    subject, claim = examination.subject, examination.claim
    if subject.dequantize is None:
        return
    codes = all_codes(claim)
    if subject.quantize is None and claim.element.bits < 8:
        wrong = {}
        for name in packings(claim.element):
            try:
                values = _dequantized(examination, codes, _ONE, name)
            except Exception:  # another packing has another shape
                continue
            wrong[name] = different(values, _decoded(claim, codes, _ONE))
        in_any_order = np.logical_and.reduce(list(wrong.values()))  # `every code` says so
        wrong = {name: differs & ~in_any_order for name, differs in wrong.items()}
        _decide(examination, wrong, _decoded(claim, codes, _ONE))
    _compare_scales(examination, "every code", claim.section, codes, (_ONE,))
    _compare_scales(examination, "scale bytes 0 to 254", "5.4.1", codes, _SCALES)
    _compare_scales(examination, "scale byte 255", "5.1", codes, (_NAN,))


def _compare_scales(
    examination: Examination, corner: str, section: str, codes: NDArray[np.uint8], scales: tuple[int, ...]
) -> None:
    """Add the row of all codes under some scale bytes."""
    deviations, text = 0, ""
    for scale in scales:
        want = _decoded(examination.claim, codes, scale)
        try:
            got = _dequantized(examination, codes, scale, str(examination.followed.packing))
        except Exception as error:
            deviations += codes.size
            text = text or raised(error)
            continue
        wrong = np.argwhere(different(got, want))
        deviations += len(wrong)
        if len(wrong) and not text:
            i, j = wrong[0]
            given = f"code 0x{codes[i, j]:02X} under scale byte {scale}"
            text = f"{given} became {text_of(got[i, j])}, expected {text_of(want[i, j])}"
    examination.rows.append(Row(corner, section, codes.size * len(scales), deviations, example=text))


def _dequantized(examination: Examination, codes: NDArray[np.uint8], scale: int, packing: str) -> NDArray[np.float64]:
    data = PACKINGS[packing].pack(codes, examination.claim.element.bits)
    return examination.subject.decode(data, np.full((len(codes), 1), scale, np.uint8), BLOCK)


def _decoded(claim: Claim, codes: NDArray[np.uint8], scale: int) -> NDArray[np.float64]:
    """Return the values of codes, each in a byte, by the tables of the specification."""
    return decode(np.full((len(codes), 1), scale, np.uint8), codes, dataclasses.replace(claim, packing="bytes"), BLOCK)


def _decide(examination: Examination, wrong: dict[str, NDArray[np.bool_]], want: NDArray[np.float64]) -> None:
    """Follow the packing with the fewest wrong values, and add the row."""
    choice, claimed = CHOICES["packing"], examination.claim.packing
    nearest = min(wrong, key=lambda name: int(wrong[name].sum()))
    examination.followed = dataclasses.replace(examination.followed, packing=nearest)
    compared = wrong.get(claimed or nearest, np.ones_like(want, bool))
    count, text = int(compared.any(1).sum()), ""
    words: tuple[str, ...] = ()
    if not count and nearest != choice.default:
        words = (choice.words(nearest),)
    elif count and nearest != claimed and not wrong[nearest].any():
        text = f"claims {choice.words(claimed)}, follows {choice.words(nearest)}"
    elif count:
        i, j = np.argwhere(compared)[0]
        text = f"value {j} of a block is not {text_of(want[i, j])} by any known order of codes"
    examination.rows.append(Row("packing", "5.1", len(want), count, words, text))
