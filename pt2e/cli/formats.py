"""The command `pt2mx formats`: print the table of element formats."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pt2mx.analysis.compare import MX_FORMATS, format_table
from pt2mx.pt2e.cli.result import Result


def run(options: argparse.Namespace) -> Result:
    rows = [
        {"format": name, **asdict(spec.element), "block_size": spec.block_size, "effective_bits": spec.effective_bits}
        for name, spec in MX_FORMATS.items()
    ]
    return Result(format_table(), {"formats": rows})
