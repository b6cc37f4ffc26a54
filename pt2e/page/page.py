"""Write a report as one self-contained HTML page, without network or other files.

Names enter the page as JSON in which no tag can end, and as escaped text for browsers without scripts. The scripts turn
them into text, never HTML. The policy of the page allows only its own style and script, by their digests, and no
request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from pt2mx.pt2e.page.contents import PageContext, contents
from pt2mx.version import __version__

if TYPE_CHECKING:
    from pt2mx.pt2e.report.report import QuantizationReport

#: the scripts, in the order of their dependencies
_SCRIPTS = (
    "dom.js", "download.js", "labels.js", "plot.js", "comparison.js", "charts.js",
    "details.js", "table.js", "layers.js", "graph.js", "main.js",
)  # fmt: skip


def page(report: QuantizationReport, context: PageContext) -> str:
    """Return the page of a report."""
    style, script = asset("page.css"), "\n".join(map(asset, _SCRIPTS))
    data = json.dumps(contents(report, context), separators=(",", ":"), allow_nan=False)
    parts = {
        "policy": f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:",
        "title": escaped(context.model or "Quantization report"),
        "summary": escaped(report.summary),
        "table": escaped(report.to_table()),
        "version": __version__,
        "style": style,
        "script": script,
        "data": data.replace("<", r"\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], asset("page.html"))


def asset(name: str) -> str:
    """Read a file of this folder."""
    return resources.files("pt2mx.pt2e.page").joinpath(name).read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Escape text for HTML; all but ASCII, surrogates included, becomes a character reference."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()


def digest(text: str) -> str:
    """Return the policy's source expression for an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
    """Return a page with one table, in the style of a report, without scripts.

    The first `left` columns hold words, the others numbers; `lead` is a sentence above the table, and `notes` are
    paragraphs below it.
    """
    style = asset("page.css")
    paragraphs = [f"<p>{escaped(note)}</p>" for note in notes]
    return _PAGE.format(
        policy=digest(style),
        style=style,
        title=escaped(title),
        lead=escaped(lead),
        header=_row("th", header, left),
        rows="\n".join(_row("td", row, left) for row in rows),
        notes=f"<footer>{''.join(paragraphs)}</footer>" if notes else "",
    )


def _row(element: str, cells: Sequence[str], left: int) -> str:
    text = ""
    for i, cell in enumerate(cells):
        kind = ' class="words"' if i < left else ""
        text += f"<{element}{kind}>{escaped(cell)}</{element}>"
    return f"<tr>{text}</tr>"
