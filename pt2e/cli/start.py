"""The process `pt2mx` before torch is imported, which takes seconds. `import pt2mx` imports this module first.

It ends the process at Ctrl-C, answers at once what needs no torch, as `--help` and `doctor`, and otherwise names its
first stage. In every other process it does nothing.
"""

from __future__ import annotations

import os
import sys

from pt2mx.pt2e.cli.interrupts import is_command  # first: it sees to Ctrl-C

#: commands that import what they need themselves: it may be missing
_WITHOUT_TORCH = ("doctor",)
#: commands whose one stage is to import torch
_SHORT = ("formats", "completion")


def start(arguments: list[str]) -> None:
    """Run a command line that needs no torch, and end; say of another one that its work begins.

    Args:
        arguments: those of the process, after its name.

    Raises:
        SystemExit: with the status, where the command has run.
    """
    from pt2mx.pt2e.cli.command import COMMANDS, main

    if sys.stderr is None:  # closed: `print` would take stdout for it
        sys.stderr = open(os.devnull, "w")
    first = arguments[0] if arguments else None
    if first not in COMMANDS or first in _WITHOUT_TORCH:
        sys.exit(main(arguments))
    if first not in _SHORT and not {"-h", "--help"} & set(arguments):
        from pt2mx.pt2e.cli.stage import stage_line

        stage_line("import torch")


if is_command():
    start(sys.argv[1:])
