"""The command `pt2mx`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback

from pt2mx.analysis.compare import print_mx_format_table
from pt2mx.errors import MXError
from pt2mx.pt2e.cli import compile, quantize, run
from pt2mx.pt2e.cli.interrupts import INTERRUPTED, MESSAGE, noted_interrupts
from pt2mx.version import __version__

#: exit statuses: of bad input, and of output that nobody reads, as shells have it
_BAD_INPUT, _BROKEN_PIPE = 2, 141


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for bad input, 130 after Ctrl-C, 141 where the
    reader of the output went away."""
    options = _parser().parse_args(arguments)
    with noted_interrupts() as interrupts:
        try:
            options.run(options)
            sys.stdout.flush()
            return 0
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
            return _BROKEN_PIPE
        except (Exception, KeyboardInterrupt) as error:
            interrupted = interrupts or isinstance(error, KeyboardInterrupt)
            if not interrupted and not isinstance(error, MXError):
                raise
            if options.traceback:
                traceback.print_exception(error)
            print(MESSAGE if interrupted else f"pt2mx: error: {error}", file=sys.stderr)
            return INTERRUPTED if interrupted else _BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pt2mx", description="Quantize PyTorch models to the OCP MX formats.")
    parser.add_argument("--version", action="version", version=f"pt2mx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_command in (quantize.add_command, compile.add_command, run.add_command, _add_formats):
        command = add_command(commands)
        command.add_argument("--traceback", action="store_true", help="print where an error arose, to its cause")
    return parser


def _add_formats(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = commands.add_parser("formats", help="print the table of element formats")
    parser.set_defaults(run=_formats)
    return parser


def _formats(options: argparse.Namespace) -> None:
    print_mx_format_table()


if __name__ == "__main__":
    sys.exit(main())
