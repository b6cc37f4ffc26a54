"""The command `pt2mx`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from pt2mx.compare import print_mx_format_table
from pt2mx.errors import MXError
from pt2mx.pt2e import compile, quantize, run
from pt2mx.version import __version__

#: exit statuses: of bad input, and of Ctrl-C, as shells have it
_BAD_INPUT, _INTERRUPTED = 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    with _noted_interrupts() as interrupts:
        try:
            options.run(options)
            return 0
        except (Exception, KeyboardInterrupt) as error:
            interrupted = interrupts or isinstance(error, KeyboardInterrupt)
            if not interrupted and not isinstance(error, MXError):
                raise
            if options.traceback:
                traceback.print_exception(error)
            print("pt2mx: interrupted" if interrupted else f"pt2mx: error: {error}", file=sys.stderr)
            return _INTERRUPTED if interrupted else _BAD_INPUT


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """The interrupts that came: code in C++ may have made another error of a KeyboardInterrupt."""
    seen: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
        yield seen
        return
    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pt2mx", description="Quantize PyTorch models to the OCP MX formats.")
    parser.add_argument("--version", action="version", version=f"pt2mx {__version__}")
    parser.set_defaults(traceback=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (quantize, compile, run):
        command = module.add_command(commands)
        command.add_argument("--traceback", action="store_true", help="print where an error arose, to its cause")
    formats = commands.add_parser("formats", help="print the table of element formats")
    formats.set_defaults(run=_formats)
    return parser


def _formats(options: argparse.Namespace) -> None:
    print_mx_format_table()


if __name__ == "__main__":
    sys.exit(main())
