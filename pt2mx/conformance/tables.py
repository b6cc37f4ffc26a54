"""Tables of the results of many checks: cases that deviate in each format, an example of each, and allowed choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pt2mx.analysis.tables import text_table
from pt2mx.conformance.result import Conformance
from pt2mx.formats import FORMATS

_HEAD = ("implementation", "scale rules", "rounding", *(f"mx{name}" for name in FORMATS))
_CHOICES_HEAD = ("implementation", "formats", "allowed choice")
_EXAMPLES_HEAD = ("implementation", "corner", "section", "formats", "smallest failing input")

Cells = list[tuple[str, ...]]


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
    """Return "deviating/all" cases."""
    cases = sum(result.cases for result in results)
    return f"{sum(result.deviations for result in results)}/{cases}" if cases else "-"


def choices(results: Sequence[Conformance]) -> Cells:
    """Return a line for each allowed choice of an implementation, without those that `summary` shows."""
    formats: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for choice in result.choices:
            if not choice.startswith(("scale rule", "rounding")):
                formats.setdefault((result.name, choice), []).append(result.format)
    return [_CHOICES_HEAD, *((name, _listed(of), choice) for (name, choice), of in formats.items())]


def examples(results: Sequence[Conformance]) -> Cells:
    """Return a line for each corner in which an implementation deviates, with the first example."""
    lines: Cells = [_EXAMPLES_HEAD]
    failing = [(result, row) for result in results for row in result.rows if row.deviations]
    for (name, corner, _), group in _grouped(failing, lambda pair: (pair[0].name, pair[1].corner, "")).items():
        sections = _listed(row.section for _, row in group)
        lines.append((name, corner, sections, _listed(result.format for result, _ in group), group[0][1].example))
    return lines


def text(results: Sequence[Conformance]) -> str:
    """Return the three tables in plain text; those without lines are left out."""
    parts = [summary(results), examples(results), choices(results)]
    return "\n\n".join(text_table(lines) for lines in parts if len(lines) > 1)


def markdown(results: Sequence[Conformance]) -> str:
    """Return the three tables in Markdown; those without lines are left out."""
    parts = [summary(results), examples(results), choices(results)]
    return "\n\n".join(_markdown_table(lines) for lines in parts if len(lines) > 1) + "\n"


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


def _once(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _listed(words: Iterable[str]) -> str:
    return ", ".join(_once(words))
