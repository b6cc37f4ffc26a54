"""Entry point of the `pt2mx` command: handle Ctrl-C and answer `--help` before torch is imported, which takes seconds.

`import pt2mx` imports this module first. In the process of the command it answers at once what needs no torch
(`--help`, `doctor`, a wrong command line), and otherwise announces the first stage. In any other process it does
nothing.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import os
import sys
import traceback

from pt2mx.sigint import is_command  # first: it handles Ctrl-C

#: commands that run without torch, which may be missing
_WITHOUT_TORCH = ("card", "completion", "doctor")
#: commands that announce no stage
_SHORT = ("formats",)
#: when the garbage collector runs (`gc.set_threshold`): graphs are millions of objects that stay, and with Python's own
#: thresholds (700, 10, 10) it took an eighth of a command
_GC_THRESHOLDS = (50_000, 20, 20)


def start(arguments: list[str]) -> None:
    """Run a command that needs no torch, refuse a wrong command line, or import torch, after announcing it.

    Args:
        arguments: the process's arguments, after its name.

    Raises:
        SystemExit: with the exit status, where the command has run, the command line is wrong or torch is broken.
    """
    from pt2mx.pt2e.cli.command import command_parser, main
    from pt2mx.pt2e.cli.parser import BAD_INPUT
    from pt2mx.pt2e.cli.progress import stage_line

    if sys.stderr is None:  # closed: `print` would use stdout instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a word that the locale lacks is written in ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
    options = command_parser().parse_args(arguments)  # ends the process at a wrong word, and after `--help`
    if arguments[0] in _WITHOUT_TORCH or _is_refused(options):
        sys.exit(main(arguments))
    gc.set_threshold(*_GC_THRESHOLDS)
    atexit.register(gc.freeze)  # otherwise Python searches all objects for cycles when the process ends
    if arguments[0] not in _SHORT:
        stage_line("import torch")
    try:
        import torch  # noqa: F401
    except Exception as error:  # of a library that is missing, too
        if options.traceback:
            traceback.print_exception(error)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(
            f"pt2mx: error: torch cannot be imported ({reason}): `pt2mx doctor` says how to repair it", file=sys.stderr
        )
        sys.exit(BAD_INPUT)


def _is_refused(options: argparse.Namespace) -> bool:
    """Return True for a wrong command line, which `main` refuses by the same check."""
    from pt2mx.errors import MXError
    from pt2mx.pt2e.cli.checks import check_usage

    try:
        check_usage(options)
    except MXError:
        return True
    return False


if is_command():
    start(sys.argv[1:])
