"""The command `pt2mx completion`: print the script with which a shell completes the command line, made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from pt2mx.pt2e.cli.parser import subparsers
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.quantizer.shipped import names

#: argument -> words that it may take, apart from files
_WORDS = {"recipe": names(), "recipes": names(), "model": ["minilm", "torchvision:", "hf:", "onnx:"]}


def run(options: argparse.Namespace) -> Result:
    for action in _actions(options.parser):
        if action.choices is None and action.nargs != 0 and action.type is None:
            if action.dest in _WORDS:  # where no word completes, a file may
                action.choices = _WORDS[action.dest]
            else:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(options.parser, options.shell)
    return Result(script, {"shell": options.shell, "script": script})


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from parser._actions
    for inner in subparsers(parser).values():
        yield from _actions(inner)
