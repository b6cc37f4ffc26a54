"""Blocks of zeros, with Inf and NaN, and lengths that 32 does not divide: here the specification leaves much open."""

from __future__ import annotations

import numpy as np

from mx_conformance.compare import compare, different, example, expected, under_other_scales
from mx_conformance.corners import rows_of
from mx_conformance.errors import MXError
from mx_conformance.examine import Examination, raised
from mx_conformance.result import Row
from mx_conformance.subject import BLOCK

#: lengths of rows that 32 does not divide
_LENGTHS = (1, 7, 31, 33, 48, 65)
_SPECIAL = {"NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf}


def run(examination: Examination) -> None:
    """Add the rows of these corners."""
    for corner in (_zeros, _special_values, _lengths):
        corner(examination)


def _zeros(examination: Examination) -> None:
    """A block of zeros stays zero, whatever its scale, which the specification does not fix."""
    x = np.zeros((3, BLOCK), np.float32)
    x[1], x[2, ::2] = -0.0, -0.0
    try:
        output = examination.subject.run(x, examination.followed)
    except Exception as error:
        examination.rows.append(Row("zero blocks", "6.3", 3, 3, example=raised(error)))
        return
    wrong = (output.values != 0).any(1)
    kept = np.signbit(output.values) == np.signbit(x)
    choices = (
        []
        if kept.all() or examination.claim.element.is_int
        else ["-0 becomes 0" if not np.signbit(output.values).any() else "0 becomes -0"]
    )
    if output.scale is not None and (output.scale != 0).any():
        choices.append(f"scale byte {output.scale.max()} of zero blocks")
    text = f"zeros became {output.values[wrong][0][0]}" if wrong.any() else ""
    examination.rows.append(Row("zero blocks", "6.3", 3, int(wrong.sum()), tuple(choices), text))


def _special_values(examination: Examination) -> None:
    """Describe what becomes of Inf and NaN, which is open: but a block of the format must be able to hold it."""
    element = examination.claim.element
    plain = rows_of([(2.0**element.emax, 2.0 ** (element.emax - 1))])
    want = expected(plain, examination.followed)[0][0]
    zero = int(np.flatnonzero(plain[0] == 0)[0])
    outcomes: dict[str, list[str]] = {}
    faults = []
    for name, value in _SPECIAL.items():
        x = plain.copy()
        x[0, zero] = value
        try:
            got = examination.subject.run(x, examination.followed).values[0]
        except Exception as error:
            outcomes.setdefault(raised(error), []).append(name)
            continue
        if np.isnan(got).all():
            continue
        numbers = got[plain[0] != 0]
        kept = not different(got[plain[0] != 0], want[plain[0] != 0]).any()
        others = "kept" if kept else "/".join(sorted({_words(v) for v in numbers}))
        outcomes.setdefault(f"{_words(got[zero])}, others {others}", []).append(name)
        if not (np.isfinite(got) | (np.isnan(got) & element.has_nan) | (np.isinf(got) & element.has_inf)).all():
            faults.append(f"{name} becomes {_words(got[zero])} in a block of numbers, and {element} has no such code")
    choices = tuple(f"{', '.join(names)} -> {outcome}" for outcome, names in outcomes.items())
    section = examination.claim.section if faults else "5.1"
    examination.rows.append(Row("Inf and NaN", section, len(_SPECIAL), len(faults), choices, "; ".join(faults[:1])))


def _words(value: float) -> str:
    return "NaN" if np.isnan(value) else "Inf" if np.isinf(value) else "0" if value == 0 else "a number"


def _lengths(examination: Examination) -> None:
    """A last block of fewer values is that of a row filled up with zeros; an implementation may refuse such rows."""
    failing, choices, text = 0, [], ""
    refused = []
    for n in _LENGTHS:
        random = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32)
        x = examination.subject.rounded(random)
        try:
            output = examination.subject.run(x, examination.followed)
        except (Exception, MXError):
            refused.append(n)
            continue
        mismatches = compare(output, x, examination.followed)
        mismatches = mismatches.of(~under_other_scales(output, x, examination.followed, mismatches))
        if mismatches.rows.any():
            failing += 1
            text = text or f"{n} values: {example(output, x, mismatches)}"
    if refused:
        some = "" if len(refused) == len(_LENGTHS) else f" {', '.join(map(str, refused))}"
        choices.append(f"refuses lengths{some} that 32 does not divide")
    examination.rows.append(Row("other lengths", "5.2", len(_LENGTHS), failing, tuple(choices), text))
