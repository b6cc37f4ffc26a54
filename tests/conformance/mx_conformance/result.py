"""`Conformance`: the result of a check, as data and as a table; and tables of the results of many checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from mx_conformance.formats import FORMATS

_HEAD = ("implementation", "scale rules", "rounding", *(f"mx{name}" for name in FORMATS))
_CHOICES_HEAD = ("implementation", "formats", "allowed choice")
_EXAMPLES_HEAD = ("implementation", "corner", "section", "verdict", "formats", "smallest failing input")

Cells = list[tuple[str, ...]]


@dataclass(frozen=True)
class Row:
    """The outcome of one corner.

    Args:
        corner: its name.
        section: the section of OCP MX v1.0 that it follows from.
        cases: blocks, or arrays, that were compared.
        deviations: those among them that deviate from what the specification requires.
        choices: conventions seen here that the specification leaves open.
        example: the smallest failing input, the result and the expected one.
        other_scales: cases that are right, but under another scale than the rule's.

    Example:
        >>> from mx_conformance import Row
        >>> Row("ties", "5.3.3", 14, choices=("rounding half_away",)).verdict
        'allowed choice'
    """

    corner: str
    section: str
    cases: int
    deviations: int = 0
    choices: tuple[str, ...] = ()
    example: str = ""
    other_scales: int = 0

    @property
    def verdict(self) -> str:
        """Return "deviation", "other scale", "allowed choice" or "ok"."""
        if self.deviations:
            return "deviation"
        return "other scale" if self.other_scales else "allowed choice" if self.choices else "ok"


@dataclass(frozen=True)
class Conformance:
    """The result of `mx_conformance.check` for one implementation in one format.

    Args:
        name: the implementation.
        format: the format.
        scale_mode, rounding: the conventions that it follows, as claimed or detected; "-" where there is none. A scale
            rule "none of these" is none that the package knows.
        rows: the outcomes, in the order of the checks.
        claims_rule: True if the caller named the scale rule.

    Example:
        >>> from mx_conformance import Conformance, Row
        >>> row = Row("saturation", "6.3", 8, 2, example="[7.0]: 7.0 became 8.0, expected 6.0")
        >>> print(Conformance("mine", "mxfp4_e2m1", "floor", "even", (row,)))
        mine, mxfp4_e2m1, scale rule floor, rounding even: 2 of 8 cases deviate
        corner      section  cases  deviate  other scale
        saturation  6.3      8      2        -            [7.0]: 7.0 became 8.0, expected 6.0
    """

    name: str
    format: str
    scale_mode: str
    rounding: str
    rows: tuple[Row, ...]
    claims_rule: bool = False

    @property
    def conforms(self) -> bool:
        """True without a deviation, and with no other scale than a claimed rule's."""
        return not self.deviations and not (self.claims_rule and self.other_scales)

    @property
    def cases(self) -> int:
        """The number of cases compared."""
        return sum(row.cases for row in self.rows)

    @property
    def deviations(self) -> int:
        """The number of cases that deviate."""
        return sum(row.deviations for row in self.rows)

    @property
    def other_scales(self) -> int:
        """The number of cases that are right under another scale than the rule's."""
        return sum(row.other_scales for row in self.rows)

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
        totals["other_scales"] = self.other_scales
        return {"name": self.name, **conventions, **totals, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        cells: Cells = [("corner", "section", "cases", "deviate", "other scale", "")]
        for row in self.rows:
            counts = (str(row.cases), str(row.deviations or "-"), str(row.other_scales or "-"))
            cells.append((row.corner, row.section, *counts, "; ".join(_notes(row))))
        verdict = f"{self.deviations} of {self.cases} cases deviate" if self.deviations else "no deviation"
        if self.other_scales:
            verdict += f", {self.other_scales} have another scale than the rule's"
        conventions = f"{self.format}, scale rule {self.scale_mode}, rounding {self.rounding}"
        return f"{self.name}, {conventions}: {verdict}\n{text_table(cells)}"


def _notes(row: Row) -> Iterator[str]:
    """Return the words for a row: the smallest failing input, and the choices."""
    if row.example:
        yield row.example
    for choice in row.choices:
        yield f"allowed choice: {choice}"


def summary(results: Sequence[Conformance]) -> Cells:
    """Return a line for each implementation, with the cases that deviate of all cases in each format, over the scale
    rules; the first line is the head."""
    lines: Cells = [_HEAD]
    for name, group in _grouped(results, lambda result: result.name).items():
        formats = _grouped(group, lambda result: result.format)
        cells = (_share(formats.get(format, ())) for format in _HEAD[3:])
        lines.append((name, _listed(r.scale_mode for r in group), _listed(r.rounding for r in group), *cells))
    return lines


def _share(results: Sequence[Conformance]) -> str:
    """Return "deviating + of another scale than the rule's / all" cases."""
    cases, other = sum(result.cases for result in results), sum(result.other_scales for result in results)
    wrong = f"{sum(result.deviations for result in results)}" + f" + {other}" * bool(other)
    return f"{wrong}/{cases}" if cases else "-"


def choices(results: Sequence[Conformance]) -> Cells:
    """Return a line for each allowed choice of an implementation, without those that `summary` shows."""
    formats: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for choice in result.choices:
            if not choice.startswith(("scale rule", "rounding")):
                formats.setdefault((result.name, choice), []).append(result.format)
    return [_CHOICES_HEAD, *((name, _listed(of), choice) for (name, choice), of in formats.items())]


def examples(results: Sequence[Conformance]) -> Cells:
    """Return a line for each corner and verdict in which an implementation deviates, or has other scales than its rule,
    with the first example."""
    lines: Cells = [_EXAMPLES_HEAD]
    failing = [(result, row) for result in results for row in result.rows if row.deviations or row.other_scales]
    key = lambda pair: (pair[0].name, pair[1].corner, pair[1].verdict)  # noqa: E731
    for (name, corner, verdict), group in _grouped(failing, key).items():
        sections = _listed(row.section for _, row in group)
        lines.append(
            (name, corner, sections, verdict, _listed(result.format for result, _ in group), group[0][1].example)
        )
    return lines


def text(results: Sequence[Conformance]) -> str:
    """Return the three tables in plain text."""
    return "\n\n".join(map(text_table, _tables(results)))


def markdown(results: Sequence[Conformance]) -> str:
    """Return the three tables in Markdown."""
    return "\n\n".join(map(_markdown_table, _tables(results))) + "\n"


def _tables(results: Sequence[Conformance]) -> list[Cells]:
    """Return the three tables, without those that have a head alone."""
    return [lines for lines in (summary(results), examples(results), choices(results)) if len(lines) > 1]


def _markdown_table(lines: Cells) -> str:
    head, *rest = lines
    escaped = (tuple(cell.replace("|", "\\|") for cell in line) for line in [head, ("---",) * len(head), *rest])
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _grouped(items: Iterable, key: Callable) -> dict:
    """Return the items by key, keys and items in order."""
    groups: dict = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def text_table(rows: Cells) -> str:
    """Return a table with aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
