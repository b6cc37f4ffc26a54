"""A report as one HTML page that needs nothing else: no network, no other file.

Names reach the page in two ways, as JSON in which no tag can end, and as escaped text for readers without scripts; the
scripts make text of them, never HTML. The policy of the page allows its own style and script by their digests, and no
request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from pt2mx.pt2e.report.page.contents import contents
from pt2mx.pt2e.report.page.context import PageContext
from pt2mx.version import __version__

if TYPE_CHECKING:
    from pt2mx.pt2e.report.report import QuantizationReport

#: the scripts, in the order in which they need one another
_SCRIPTS = ("dom.js", "plot.js", "charts.js", "details.js", "table.js", "layers.js", "graph.js", "main.js")


def page(report: QuantizationReport, context: PageContext) -> str:
    """The page of a report."""
    style, script = asset("page.css"), "\n".join(map(asset, _SCRIPTS))
    data = json.dumps(contents(report, context), separators=(",", ":"), allow_nan=False)
    parts = {
        "policy": f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}",
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
    """A file of this folder."""
    return resources.files("pt2mx.pt2e.report.page").joinpath(name).read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Text in HTML; what is not ASCII, a surrogate too, as a reference."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()


def digest(text: str) -> str:
    """The source expression of an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
