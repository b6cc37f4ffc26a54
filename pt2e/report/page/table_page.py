"""A page of one table, in the style of the page of a report, without scripts."""

from __future__ import annotations

from collections.abc import Sequence

from pt2mx.pt2e.report.page.page import asset, digest, escaped

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src {policy}"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="lead">{lead}</p></header>
<main class="scroll" tabindex="0"><table class="plain">
<thead>{header}</thead>
<tbody>
{rows}
</tbody>
</table></main>
{notes}
</body>
</html>
"""


def table_page(
    title: str, lead: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int, notes: Sequence[str] = ()
) -> str:
    """The page of a table.

    Args:
        title: its heading.
        lead: a sentence below it.
        header: the names of the columns.
        rows: the cells, as text.
        left: how many of the first columns are words, the others being numbers.
        notes: paragraphs below the table.
    """
    style = asset("page.css")
    return _PAGE.format(
        policy=digest(style),
        style=style,
        title=escaped(title),
        lead=escaped(lead),
        header=_row("th", header, left),
        rows="\n".join(_row("td", row, left) for row in rows),
        notes=f"<footer>{''.join(f'<p>{escaped(note)}</p>' for note in notes)}</footer>" if notes else "",
    )


def _row(element: str, cells: Sequence[str], left: int) -> str:
    words = (f'<{element} class="words">{escaped(cell)}</{element}>' for cell in cells[:left])
    numbers = (f"<{element}>{escaped(cell)}</{element}>" for cell in cells[left:])
    return f"<tr>{''.join((*words, *numbers))}</tr>"
