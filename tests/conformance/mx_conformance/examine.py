"""Run the corners on an implementation, decide by them which open conventions it follows, and list the outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mx_conformance import corners
from mx_conformance.compare import Mismatches, compare, example, simplest, under_other_scales
from mx_conformance.conventions import CHOICES, NONE_OF_THESE, Claim
from mx_conformance.errors import MXError
from mx_conformance.formats import ElementFormat
from mx_conformance.result import Row
from mx_conformance.subject import Output, Subject


@dataclass(frozen=True)
class Corner:
    """One corner that compares with exact arithmetic.

    Args:
        name: what a table calls it.
        section: the section of OCP MX v1.0; None: the one of the element.
        blocks: (element) -> the blocks.
        decides: the field of `Claim` whose values differ in this corner.
        with_scale: True compares scale bytes, too, and tells deviations from other scales than the rule's; where no
            rule fits, every corner may.
        of_elements: True if it also applies to elements without a scale, as all its scales are 1.
        overflows: True if Inf and NaN are allowed there as results of elements without a scale, beyond their range.
    """

    name: str
    section: str | None
    blocks: Callable[[ElementFormat], list[corners.Block]]
    decides: str | None = None
    with_scale: bool = False
    of_elements: bool = False
    overflows: bool = False


CORNERS = (
    Corner("normal numbers", None, corners.values, of_elements=True),
    Corner("ties", None, corners.ties, decides="rounding", of_elements=True),
    Corner("next to ties", None, corners.near_ties, of_elements=True),
    Corner("subnormals", None, corners.subnormals, of_elements=True),
    Corner(
        "saturation", "6.3", corners.saturation, decides="full_range", with_scale=True, of_elements=True, overflows=True
    ),
    Corner("scale rule", "6.3", corners.scale_rule, decides="scale_mode", with_scale=True),
    Corner("powers of two", "6.3", corners.powers_of_two, with_scale=True),
    Corner("largest values", "6.3", corners.largest_values, with_scale=True),
    Corner("small blocks", "5.4.1", corners.small_blocks, with_scale=True),
    Corner("large blocks", "5.4.1", corners.large_blocks, with_scale=True),
    Corner("random values", "6.3", corners.random_values, with_scale=True),
)

#: field of `Claim` -> the blocks whose results decide it, in this order
DECISIONS: dict[str, Callable[[ElementFormat], list[corners.Block]]] = {
    "rounding": lambda element: corners.ties(element) + corners.near_ties(element),
    "scale_mode": corners.scale_rule,
    "full_range": corners.saturation,
}


@dataclass
class Examination:
    """The state of a check.

    Args:
        subject: the implementation.
        claim: what it claims.
        elements_only: True if its values have no scale.
        followed: the conventions that it follows as far as is known; the claim's, or the defaults, until decided.
        rule: the scale rule that fits, by name; None if none does.
        rows: the outcomes so far.
    """

    subject: Subject
    claim: Claim
    elements_only: bool = False
    followed: Claim = field(init=False)
    rule: str | None = field(init=False)
    rows: list[Row] = field(default_factory=list)
    #: field of the claim -> the words of an allowed choice, and what to add to an example of a deviation
    _notes: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.followed = self.claim.with_defaults()
        self.rule = self.followed.scale_mode

    def run(self, corner: Corner) -> None:
        """Run a corner and add its row, unless the element has no such values."""
        blocks = corner.blocks(self.claim.element)
        if not blocks:
            return
        x, section = self.subject.rounded(corners.rows_of(blocks)), corner.section or self.claim.section
        try:
            output = self.subject.run(x, self.followed)
        except MXError:
            raise
        except Exception as error:
            self.rows.append(Row(corner.name, section, len(x), len(x), example=raised(error)))
            return

        overflow = self.elements_only and corner.overflows
        claim, (words, hint) = self.followed, self._notes.get(corner.decides or "", ((), ""))
        if corner.decides and getattr(self.claim, corner.decides) is not None:
            claim = dataclasses.replace(claim, **{corner.decides: getattr(self.claim, corner.decides)})
        mismatches = compare(output, x, claim, corner.with_scale, overflow)
        if overflow and not np.isfinite(output.values).all():
            words += ("overflow becomes " + ("NaN" if np.isnan(output.values).any() else "Inf"),)
        # values alone show another scale for the anchor by failing in each block whose largest magnitude it is
        anchored = np.abs(x).max(1) == 2.0**self.claim.element.emax
        shows_scale = output.scale is not None or mismatches.rows[anchored].all()
        free = not self.elements_only and (corner.with_scale or (self.rule is None and shows_scale))
        other = under_other_scales(output, x, claim, mismatches) if free else np.zeros(len(x), bool)
        wrong, text = mismatches.rows & ~other, ""
        if mismatches.rows.any():
            deviates = bool(wrong.any())
            shown = mismatches.of(wrong if deviates else other)
            text = example(*self._shrunk(x, output, claim, shown, deviates and self.rule is None)) + hint
        self.rows.append(Row(corner.name, section, len(x), int(wrong.sum()), words, text, int(other.sum())))

    def decide(self) -> None:
        """Find the conventions that results follow: the claimed one if nothing fits better, else the nearest."""
        for name, blocks in DECISIONS.items():
            if self.elements_only and name == "scale_mode":
                continue
            choice, claimed = CHOICES[name], getattr(self.claim, name)
            x = self.subject.rounded(corners.rows_of(blocks(self.claim.element)))
            try:
                output = self.subject.run(x, self.followed)
            except Exception:  # its corner says so
                continue
            counts: dict[Any, int] = {}
            for value in dict.fromkeys((claimed, *choice.allowed(self.claim.element))):
                if value is not None and all(counts.values()):  # until one fits
                    counts[value] = self._count(output, x, name, value)
            nearest = min(counts, key=lambda value: counts[value])
            self.followed = dataclasses.replace(self.followed, **{name: nearest})
            value, hint = nearest if claimed is None else claimed, ""
            if counts[value] and nearest != claimed:
                hint = f"; {'nearest is' if counts[nearest] else 'it follows'} {choice.words(nearest)}"
            if name == "scale_mode":
                self.rule = None if counts[nearest] else str(nearest)
                value = claimed or self.rule or NONE_OF_THESE
            named = value != choice.default and not counts.get(value)
            self._notes[name] = (choice.words(value),) if named else (), hint

    def _count(self, output: Output, x: NDArray[np.float32], name: str, value: object) -> int:
        """Return how many results differ with a value of a convention.

        The rounding is decided before the scale rule, by blocks whose largest value is a power of two: there every rule
        of an amax but "doubled" has the scale of "floor"."""
        before = ("floor", "doubled") if name == "rounding" and not self.elements_only else ()
        modes = {self.followed.scale_mode, *before}
        claims = [dataclasses.replace(self.followed, **{"scale_mode": mode, name: value}) for mode in modes]
        return min(compare(output, x, claim, overflow=self.elements_only).count for claim in claims)

    def _shrunk(
        self, x: NDArray[np.float32], output: Output, claim: Claim, mismatches: Mismatches, any_scale: bool
    ) -> tuple[Output, NDArray[np.float32], Mismatches]:
        """Return the arguments of `example`, of the simplest failing row with the largest magnitude and a wrong value
        alone, if that stays wrong: under any scale or the rule's."""
        i = simplest(x, mismatches)
        if mismatches.values[i].any() and np.count_nonzero(x[i]) > 2:
            small, j = np.zeros_like(x[i : i + 1]), int(np.flatnonzero(mismatches.values[i])[0])
            kept = [np.abs(x[i]).argmax(), j]
            small[0, kept] = x[i, kept]
            again = self.subject.run(small, self.followed)
            compared = compare(again, small, claim)
            explained = any_scale and under_other_scales(again, small, claim, compared).any()
            if compared.values[0, j] and not explained:
                return again, small, compared
        return output, x, mismatches


def raised(error: Exception) -> str:
    """Return an exception as the words of a row."""
    lines = str(error).strip().splitlines()
    return f"raised {type(error).__name__}{': ' + lines[0][:100] if lines else ''}"
