"""The command `pt2mx conformance`: check implementations of the MX formats against the specification."""

from __future__ import annotations

import argparse

from pt2mx.conformance import tables
from pt2mx.conformance.adapters.table import ADAPTERS, missing, score
from pt2mx.conformance.claims import parse_claim
from pt2mx.conformance.result import Conformance
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.output import json_text, write_text


def run(options: argparse.Namespace) -> Result:
    for format in options.format:
        parse_claim(format)
    for name in options.implementation:
        if name not in ADAPTERS:
            raise MXError(f"unknown implementation {name!r}: {nearest(name, ADAPTERS)}")
    absent = missing(options.implementation or ADAPTERS)
    names = [name for name in options.implementation or ADAPTERS if name not in absent]
    progress = Progress(len(names), first=None)
    results: list[Conformance] = []
    for name in names:
        progress.begin(f"check {name}")
        results += score(name, options.format)
    lines = [f"{name} is not installed: {install}" for name, install in absent.items()]
    data: dict[str, object] = {"results": [result.to_dict() for result in results], "not_installed": absent}
    if options.output is not None:
        is_json = str(options.output).lower().endswith(".json")
        write_text(json_text(data) if is_json else tables.markdown(results), options.output)
    return Result("\n".join(filter(None, [tables.text(results), "", *lines])), data)
