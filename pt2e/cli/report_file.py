"""The file that `--report` names: JSON or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.report.report import QuantizationReport

_JSON = ".json"
#: suffixes of a report
SUFFIXES = (_JSON, ".html", ".htm")


def write_report(report: QuantizationReport, path: str, **page: Any) -> None:
    """Write a report in the form that the suffix of its path says.

    Args:
        report: the report.
        path: the file.
        **page: further arguments of `QuantizationReport.to_html`.

    Raises:
        MXError: where the file cannot be written.
    """
    with user_errors(f"write {path!r}"):
        if Path(path).suffix.lower() == _JSON:
            report.to_json(path)
        else:
            report.to_html(path, **page)
