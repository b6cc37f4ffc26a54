"""The command `pt2mx inspect`: print the contents of a program, a package or the folder of a language model."""

from __future__ import annotations

import argparse

from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.inspect.inspect_file import inspect_file
from pt2mx.pt2e.inspect.schema import as_json, table
from pt2mx.pt2e.program.provenance import other_version


def run(options: argparse.Namespace) -> Result:
    with user_errors(f"read {options.file!r}"):
        files = inspect_file(options.file)
    for info in files:
        if text := other_version(info.file):
            note(text)
    return Result("\n\n\n".join(map(table, files)), {"files": [as_json(info) for info in files]})
