"""The result of `pt2mx quantize`: a short report, the operators that lose most, and the file or folder it wrote."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pt2mx.pt2e.checkpoints.coverage import Coverage
from pt2mx.pt2e.cli.argument import WORST_OPERATORS
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.report.agreement import Fidelity
from pt2mx.pt2e.report.report import QuantizationReport
from pt2mx.pt2e.report.rows import OperatorReport


def summary(report: QuantizationReport, full: bool = False, all_of_them: str = "--full prints all") -> str:
    """Return the table of a report in short: the operators with the lowest SQNR, the worst first, and the totals.

    Args:
        report: of a converted model.
        full: return the whole table, as of a report with few operators.
        all_of_them: says where the others are.

    Returns:
        The lines. Of a loaded program no SQNR is known: the table then has the operators with the most bytes.
    """
    if full or len(report.operators) <= WORST_OPERATORS:
        return report.to_table()
    known = [operator for operator in report.operators if _sqnr(operator) is not None]
    if known:
        what, order = "with the lowest SQNR", sorted(known, key=lambda operator: _sqnr(operator) or 0.0)
    else:
        what, order = "with the most bytes", sorted(report.operators, key=_bytes, reverse=True)
    shown = order[:WORST_OPERATORS]
    *table, _ = replace(report, operators=tuple(shown)).to_table().splitlines()
    heading = f"the {len(shown)} operators {what} of {len(report.operators)} ({all_of_them}):"
    left = Counter(operator.reason for operator in report.operators if not operator.quantized)
    reasons = [f"left alone: {count} x {reason}" for reason, count in left.most_common()]
    return "\n".join([heading, *table, *reasons, report.summary])


def quantized(
    report: QuantizationReport,
    options: argparse.Namespace,
    stages: Progress,
    *,
    lines: Sequence[str] = (),
    coverage: Coverage | None = None,
    **fidelities: Fidelity | None,
) -> Result:
    """Return the result of a model that was quantized and written to `options.output`.

    Args:
        report: of the model.
        options: those of the command.
        stages: that have ended.
        lines: that stand after the report.
        coverage: the share of its checkpoint that the model holds; None: it is of no checkpoint.
        **fidelities: name of what was compared with another -> how they agree.
    """
    size = bytes_of(options.output)
    known = {name: found for name, found in fidelities.items() if found is not None}
    text = [
        summary(report, options.full),
        *lines,
        *([] if coverage is None else [f"the program holds {coverage}"]),
        *(f"{name.replace('_', ' ')}: {found}" for name, found in known.items()),
        f"{options.output}: {size / 1e6:.1f} MB, {report.effective_bits:.2f} bits a value; {stages.seconds()}",
    ]
    data = {
        "output": str(options.output),
        "bytes": size,
        "effective_bits": report.effective_bits,
        **({} if coverage is None else {"checkpoint": coverage.to_dict()}),
        **{name: found._asdict() for name, found in known.items()},
        "seconds": stages.times(),
        "report": json.loads(report.to_json()),
    }
    return Result("\n".join(text), data)


def bytes_of(path: str | Path) -> int:
    """Return the size of a file, or of the files in a folder."""
    files = Path(path).iterdir() if Path(path).is_dir() else [Path(path)]
    return sum(file.stat().st_size for file in files)


def _sqnr(operator: OperatorReport) -> float | None:
    """The lowest of an operator's operands, in dB; None where none is known."""
    known = [operand.statistics.sqnr for operand in operator.operands if operand.statistics]
    return min(known, default=None)


def _bytes(operator: OperatorReport) -> int:
    return sum(operand.bytes_before for operand in operator.operands)
