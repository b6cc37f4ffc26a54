"""The command `pt2mx`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.interrupts import INTERRUPTED, MESSAGE, noted_interrupts
from pt2mx.version import __version__

#: command -> (the module with its `add_arguments`, the help text)
_COMMANDS = {
    "quantize": ("pt2mx.pt2e.cli.quantize", "export, calibrate, convert and save a model"),
    "compile": ("pt2mx.pt2e.cli.compile", "compile an exported program by AOTInductor"),
    "generate": ("pt2mx.pt2e.cli.generate", "continue prompts with a quantized language model"),
    "perplexity": ("pt2mx.pt2e.cli.perplexity", "judge language models by a text that they predict"),
    "run": ("pt2mx.pt2e.cli.run", "run a package that `pt2mx compile` wrote"),
    "inspect": ("pt2mx.pt2e.cli.inspect_file", "say what a program, a package or a language model holds"),
    "export-onnx": ("pt2mx.pt2e.cli.export_onnx", "write an ONNX file of an exported program"),
    "save-checkpoint": ("pt2mx.pt2e.cli.save_checkpoint", "write a checkpoint that transformers loads"),
    "convert-checkpoint": ("pt2mx.pt2e.cli.convert_checkpoint", "quantize a checkpoint file by file"),
    "recipes": ("pt2mx.pt2e.cli.recipes", "list, show and check recipes"),
    "formats": ("pt2mx.pt2e.cli.formats", "print the table of element formats"),
}

#: exit statuses: of bad input, and of output that nobody reads, as shells have it
_BAD_INPUT, _BROKEN_PIPE = 2, 141


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: those of the command; by default the process's own.

    Returns:
        The exit status: 0, 2 for bad input, 130 after Ctrl-C, 141 where the reader of the output went away.

    Raises:
        SystemExit: for `--help`, `--version` and a command line that argparse refuses.

    Example:
        >>> from pt2mx.pt2e.cli.command import main
        >>> main(["run", "no_such_package.pt2"])  # the error goes to stderr
        2
    """
    try:
        options = _parser().parse_args(arguments)
    except MXError as error:  # a command that needs a package which is not installed
        print(f"pt2mx: error: {error}", file=sys.stderr)
        return _BAD_INPUT
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
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, (module, what) in _COMMANDS.items():
        commands.add_parser(name, module=module, help=what)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """A parser that gets its arguments from the command's module once the command is given: to import all of the
    modules takes seconds."""

    def __init__(self, *, module: str, **options: Any) -> None:
        super().__init__(**options)
        self._module = module

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        importlib.import_module(self._module).add_arguments(self)
        self.add_argument("--traceback", action="store_true", help="print where an error arose, to its cause")
        return super().parse_known_args(args, namespace)


if __name__ == "__main__":
    sys.exit(main())
