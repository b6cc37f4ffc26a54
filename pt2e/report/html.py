"""A report as one HTML page without scripts or other files: bars and histograms are inline SVG."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from pt2mx.analysis.sums import QuantizationStatistics

if TYPE_CHECKING:
    from pt2mx.pt2e.report.report import QuantizationReport
    from pt2mx.pt2e.report.rows import OperandReport, OperatorReport

#: dB at which a bar is full
_FULL = 60
_WIDTH, _HEIGHT = 160, 48

_STYLE = """
:root { color-scheme: light dark }
body { font: 14px system-ui, sans-serif; margin: 2em }
table { border-collapse: collapse; margin: .5em 0 1em }
th, td { padding: .2em .7em; text-align: left; vertical-align: middle }
td.number { text-align: right; font-variant-numeric: tabular-nums }
th { border-bottom: 1px solid gray }
summary { padding: .25em 0; cursor: pointer }
summary .note { color: gray }
rect { fill: steelblue }
svg text { font-size: 9px; fill: gray }
details { margin-left: 1em }
"""


def page(report: QuantizationReport) -> str:
    """The page of a report: totals, then each operator with what was observed of its operands."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>Quantization report</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Quantization report</h1>\n<p>{escape(report.summary)}</p>\n"
        f"<p>SQNR in dB; bars are full at {_FULL} dB. Saturated and flushed: shares of the values that were beyond the "
        f"largest of their block, and that became zero. Histograms: blocks by their shared exponent.</p>\n"
        f"{''.join(map(_operator, report.operators))}</body></html>\n"
    )


def _operator(operator: OperatorReport) -> str:
    operands = [o for o in operator.operands if o.spec or o.bytes_before]
    specs = " &#215; ".join(escape(o.spec or "-") for o in operands if o.role != "bias")
    head = " ".join(escape(word) for word in (operator.module, operator.operator) if word)
    lines = [
        f"<details open=\"open\"><summary><b>{head}</b> {specs} <span class='note'>{escape(operator.notes)}</span>"
    ]
    lines.append(f"</summary><table><tr>{''.join(f'<th>{name}</th>' for name in _COLUMNS)}</tr>")
    lines += [_operand(operand) for operand in operands]
    return "".join([*lines, "</table></details>\n"]) if operands else lines[0] + "</summary></details>\n"


_COLUMNS = ("operand", "spec", "SQNR", "", "saturated", "flushed", "bytes", "after", "block exponents")


def _operand(operand: OperandReport) -> str:
    sizes = [f"{n:,}" if n else "" for n in (operand.bytes_before, operand.bytes_after)]
    row = _line(operand.role, operand.spec or "-", operand.statistics, *sizes)
    return row + "".join(_line("", f"candidate {name}", seen) for name, seen in operand.candidates.items())


def _line(role: str, spec: str, seen: QuantizationStatistics | None, before: str = "", after: str = "") -> str:
    cells = [f"<td>{escape(role)}</td><td>{escape(spec)}</td>"]
    if seen is None:
        cells.append("<td></td>" * 4 if spec == "-" else '<td colspan="4">no statistics of a calibration</td>')
    else:
        cells.append(f'<td class="number">{seen.sqnr:.1f}</td><td>{_bar(seen.sqnr)}</td>')
        cells += [f'<td class="number">{share:.2%}</td>' for share in (seen.saturated, seen.flushed)]
    cells += [f'<td class="number">{size}</td>' for size in (before, after)]
    cells.append(f"<td>{_histogram(seen.exponents) if seen else ''}</td>")
    return f"<tr>{''.join(cells)}</tr>\n"


def _bar(sqnr: float) -> str:
    share = 0.0 if math.isnan(sqnr) else min(max(sqnr / _FULL, 0.0), 1.0)
    return f'<svg width="{_WIDTH}" height="10"><rect width="{share * _WIDTH:.1f}" height="10"/></svg>'


def _histogram(exponents: dict[int, int]) -> str:
    """Bars from the least exponent to the largest, both of which are written below."""
    if not exponents:
        return ""
    least, largest, most = min(exponents), max(exponents), max(exponents.values())
    step = _WIDTH / (largest - least + 1)
    bars = "".join(
        f'<rect x="{(e - least) * step:.1f}" y="{_HEIGHT * (1 - n / most):.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{_HEIGHT * n / most:.1f}"><title>2^{e}: {n:,} blocks</title></rect>'
        for e, n in sorted(exponents.items())
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 12}">{bars}<text x="0" y="{_HEIGHT + 10}">2^{least}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 10}" text-anchor="end">2^{largest}</text></svg>'
    )
