"""`Conformance`: the result of a check, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pt2mx.analysis.tables import text_table


@dataclass(frozen=True)
class Row:
    """The outcome of one corner.

    Args:
        corner: its name.
        section: the section of OCP MX v1.0 that it follows from.
        cases: blocks, or arrays, that were compared.
        deviations: those among them that deviate.
        choices: conventions seen here that the specification leaves open.
        example: the smallest failing input, the result and the expected one.

    Example:
        >>> from pt2mx.conformance import Row
        >>> Row("ties", "5.3.3", 14, choices=("rounding half_away",)).verdict
        'allowed choice'
    """

    corner: str
    section: str
    cases: int
    deviations: int = 0
    choices: tuple[str, ...] = ()
    example: str = ""

    @property
    def verdict(self) -> str:
        """Return "deviation", "allowed choice" or "ok"."""
        return "deviation" if self.deviations else "allowed choice" if self.choices else "ok"


@dataclass(frozen=True)
class Conformance:
    """The result of `pt2mx.conformance.check` for one implementation in one format.

    Args:
        name: the implementation.
        format: the format.
        scale_mode, rounding: the conventions that it follows, as claimed or detected; "-" where there is none.
        rows: the outcomes, in the order of the checks.

    Example:
        >>> from pt2mx.conformance import Conformance, Row
        >>> row = Row("saturation", "6.3", 8, 2, example="[7.0]: 7.0 became 8.0, expected 6.0")
        >>> print(Conformance("mine", "mxfp4_e2m1", "floor", "even", (row,)))
        mine, mxfp4_e2m1, scale rule floor, rounding even: 2 of 8 cases deviate
        corner      section  cases  deviate
        saturation  6.3      8      2        [7.0]: 7.0 became 8.0, expected 6.0
    """

    name: str
    format: str
    scale_mode: str
    rounding: str
    rows: tuple[Row, ...]

    @property
    def conforms(self) -> bool:
        """True without a deviation."""
        return not any(row.deviations for row in self.rows)

    @property
    def cases(self) -> int:
        """The number of cases compared."""
        return sum(row.cases for row in self.rows)

    @property
    def deviations(self) -> int:
        """The number of cases that deviate."""
        return sum(row.deviations for row in self.rows)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed choices, each once."""
        return tuple(dict.fromkeys(choice for row in self.rows for choice in row.choices))

    def to_dict(self) -> dict[str, object]:
        """Return the result as plain data.

        Returns:
            Name, format, conventions, totals, and a dict of each row.
        """
        conventions = {"format": self.format, "scale_mode": self.scale_mode, "rounding": self.rounding}
        totals = {"conforms": self.conforms, "cases": self.cases, "deviations": self.deviations}
        return {"name": self.name, **conventions, **totals, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        cells = [("corner", "section", "cases", "deviate", "")]
        cells += [
            (row.corner, row.section, str(row.cases), str(row.deviations or "-"), "; ".join(_notes(row)))
            for row in self.rows
        ]
        verdict = f"{self.deviations} of {self.cases} cases deviate" if self.deviations else "no deviation"
        conventions = f"{self.format}, scale rule {self.scale_mode}, rounding {self.rounding}"
        return f"{self.name}, {conventions}: {verdict}\n{text_table(cells)}"


def _notes(row: Row) -> Iterator[str]:
    """Return the words for a row: the smallest failing input, and the choices."""
    if row.example:
        yield row.example
    for choice in row.choices:
        yield f"allowed choice: {choice}"
