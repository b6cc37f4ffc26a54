"""The report of a language model, and the file that `--report` names: JSON or a page."""

from __future__ import annotations

import operator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pt2mx.fx.graph.recompile import module_of
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report
from pt2mx.pt2e.user_errors import user_errors

if TYPE_CHECKING:
    from pt2mx.pt2e.language.language_model import LanguageModel

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


def model_report(model: LanguageModel) -> QuantizationReport:
    """Return the report of the programs of a model."""
    first, *others = (quantization_report(module_of(program, check_guards=False)) for program in model.programs)
    return reduce(operator.add, others, first)
