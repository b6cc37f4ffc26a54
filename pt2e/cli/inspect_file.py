"""The command `pt2mx inspect`: the contents of a program, a package or the folder of a language model."""

from __future__ import annotations

import argparse

from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.cli.stage import note, user_errors
from pt2mx.pt2e.contents.contents import contents_of
from pt2mx.pt2e.contents.text import as_json, table
from pt2mx.pt2e.origin import other_version


def run(options: argparse.Namespace) -> Result:
    with user_errors(f"read {options.file!r}"):
        found = contents_of(options.file)
    for contents in found:
        if text := other_version(contents.file):
            note(text)
    text = "\n\n\n".join(map(table, found))
    return Result(text, {"files": [as_json(contents) for contents in found]})
