"""The command `pt2mx conformance`: check implementations of the MX formats, by the package mx-conformance."""

from __future__ import annotations

import argparse

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result, is_json
from pt2mx.pt2e.files.output import write_text


def run(options: argparse.Namespace) -> Result:
    try:
        from mx_conformance.adapters import report, score, select
        from mx_conformance.errors import MXError as ConformanceError
        from mx_conformance.result import markdown
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("mx_conformance"):
            raise
        raise MXError(
            "`pt2mx conformance` needs the package mx-conformance: pip install ./tests/conformance in a clone of pt2mx"
        ) from None
    try:
        installed, absent = select(options.implementation, options.format)
    except ConformanceError as error:  # a class of its own, as the package runs without pt2mx
        raise MXError(str(error)) from None
    progress = Progress(len(installed), first=None)
    results = []
    for name in installed:
        progress.begin(f"check {name}")
        results += list(score(name, options.format))
    result = Result(*report(results, absent))
    if options.output is not None:
        write_text(result.to_json() if is_json(options.output) else markdown(results), options.output)
    return result
