"""The result of a command: text for people, data for programs (`--json`); the report of `quantize` in short."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.arguments import WORST_OPERATORS
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.files.output import json_text

if TYPE_CHECKING:  # they import torch
    from pt2mx.analysis.agreement import Fidelity
    from pt2mx.pt2e.models.coverage import Coverage
    from pt2mx.pt2e.report.report import QuantizationReport
    from pt2mx.pt2e.report.rows import OperatorReport


@dataclass(frozen=True)
class Result:
    """The result of a command, which `main` prints: the text, or with `--json` the data.

    Args:
        text: the lines for people.
        data: name -> what `json.dumps` takes.
        status: the exit status.
        error: what ended the command early, after the result; `main` reports it behind the result.
    """

    text: str
    data: dict[str, object]
    status: int = 0
    error: MXError | None = None

    def to_json(self) -> str:
        """Return the data as one JSON object; numbers that are not finite become null."""
        return json_text(self.data)


@contextmanager
def only_result_on_stdout() -> Iterator[None]:
    """Redirect what the block prints to stderr, including output of other processes and of C++ code."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def quantized_result(
    report: QuantizationReport,
    options: argparse.Namespace,
    progress: Progress,
    *,
    lines: Sequence[str] = (),
    coverage: Coverage | None = None,
    **fidelities: Fidelity | None,
) -> Result:
    """Return the result of a model that was quantized and written to `options.output`.

    Args:
        report: the report of the model.
        options: the options of the command.
        progress: its stages, which have ended.
        lines: lines to print after the report.
        coverage: the share of its checkpoint that the model holds; None: it comes from no checkpoint.
        **fidelities: name of a comparison -> its result; None: nothing was compared.
    """
    size = size_of(options.output)
    text = [summary(report, options.full), *lines]
    data: dict[str, object] = {"output": options.output, "bytes": size, "effective_bits": report.effective_bits}
    if coverage is not None:
        text.append(f"the program holds {coverage}")
        data["checkpoint"] = coverage.to_dict()
    for name, fidelity in fidelities.items():
        if fidelity is not None:
            text.append(f"{name.replace('_', ' ')}: {fidelity}")
            data[name] = fidelity._asdict()
    text.append(
        f"{options.output}: {size / 1e6:.1f} MB, {report.effective_bits:.2f} bits a value; {progress.seconds()}"
    )
    data |= {"seconds": progress.times(), "report": json.loads(report.to_json())}
    return Result("\n".join(text), data)


def is_json(path: str) -> bool:
    """Return True for a file whose name ends in .json."""
    return path.lower().endswith(".json")


def write_report(report: QuantizationReport, path: str, **page: Any) -> None:
    """Write a report as JSON or as a page, as the suffix of its path says; `page` has arguments of `to_html`."""
    from pt2mx.pt2e.files.user_errors import user_errors  # imports torch

    with user_errors(f"write {path!r}"):
        if is_json(path):
            report.to_json(path)
        else:
            report.to_html(path, **page)


def summary(report: QuantizationReport, full: bool = False, hint: str = "--full prints all") -> str:
    """Return the table of a report in short: the operators with the lowest SQNR, the worst first, and the totals.

    Args:
        report: the report of a converted model.
        full: return the whole table, which a report with few operators also returns.
        hint: where to find the other operators.

    Returns:
        The lines. Where no SQNR is known (of a loaded program) or finite (of optimized weights), the table has the
        operators with the most bytes instead.
    """
    if full or len(report.operators) <= WORST_OPERATORS:
        return report.to_table()
    measured = [operator for operator in report.operators if _sqnr(operator) is not None]
    if any(_sqnr(operator) != math.inf for operator in measured):
        order, ranked = "with the lowest SQNR", sorted(measured, key=lambda operator: _sqnr(operator) or 0.0)
    else:
        order, ranked = "with the most bytes", sorted(report.operators, key=_bytes, reverse=True)
    shown = ranked[:WORST_OPERATORS]
    *table, _ = replace(report, operators=tuple(shown)).to_table().splitlines()
    heading = f"the {len(shown)} operators {order} of {len(report.operators)} ({hint}):"
    reasons = Counter(operator.reason for operator in report.operators if not operator.quantized)
    skipped = [f"not quantized: {count} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join([heading, *table, *skipped, report.summary])


def size_of(path: str | Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    files = Path(path).iterdir() if Path(path).is_dir() else [Path(path)]
    return sum(file.stat().st_size for file in files)


def _sqnr(operator: OperatorReport) -> float | None:
    """Return the lowest SQNR of an operator's operands in dB; None where none was measured."""
    measured = [operand.statistics.sqnr for operand in operator.operands if operand.statistics]
    return min(measured, default=None)


def _bytes(operator: OperatorReport) -> int:
    return sum(operand.bytes_before for operand in operator.operands)
