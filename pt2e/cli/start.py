"""The process `pt2mx` before torch is imported, which takes seconds. `import pt2mx` imports this module first.

It ends the process at Ctrl-C, answers at once what needs no torch, as `--help`, `doctor` and a wrong command line, and
otherwise names its first stage. In every other process it does nothing.
"""

from __future__ import annotations

import io
import os
import sys

from pt2mx.pt2e.cli.interrupts import is_command  # first: it sees to Ctrl-C

#: commands that run before torch is imported: it may be missing, or of no use
_WITHOUT_TORCH = ("doctor", "completion")
#: commands whose one stage is to import torch
_SHORT = ("formats",)


def start(arguments: list[str]) -> None:
    """Run a command line that needs no torch, or refuse a wrong one, and end; say of another one that its work begins.

    Args:
        arguments: those of the process, after its name.

    Raises:
        SystemExit: with the status, where the command has run, or cannot.
    """
    from pt2mx.pt2e.cli.command import command_parser, main

    if sys.stderr is None:  # closed: `print` would take stdout for it
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a word that the locale lacks is written in ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
    command_parser().parse_args(arguments)  # ends the process at a wrong word, and after `--help`
    if arguments[0] in _WITHOUT_TORCH:
        sys.exit(main(arguments))
    if arguments[0] not in _SHORT:
        from pt2mx.pt2e.cli.stage import stage_line

        stage_line("import torch")


if is_command():
    start(sys.argv[1:])
