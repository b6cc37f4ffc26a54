"""The command `pt2mx`. This module imports no torch; the module of a command is imported when the command runs."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import nullcontext

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.checks import check_usage
from pt2mx.pt2e.cli.parser import BAD_INPUT, Parser, make_parser
from pt2mx.pt2e.cli.progress import warnings_as_notes
from pt2mx.pt2e.cli.result import only_result_on_stdout
from pt2mx.sigint import INTERRUPTED, MESSAGE, record_sigint

#: command -> (the function that runs it, the help text)
COMMANDS = {
    "quantize": ("pt2mx.pt2e.cli.quantize:run", "export, calibrate, convert and save a model"),
    "compare": ("pt2mx.pt2e.cli.compare:run", "quantize a model with every recipe and compare size and quality"),
    "sensitivity": ("pt2mx.pt2e.cli.sensitivity:run", "measure which formats each module of a model tolerates"),
    "slice": ("pt2mx.pt2e.cli.slice:run", "turn an 8-bit program into one of a narrower recipe, without data"),
    "compile": ("pt2mx.pt2e.cli.compile:run", "compile an exported program with AOTInductor"),
    "run": ("pt2mx.pt2e.cli.run:run", "run a package that `pt2mx compile` wrote"),
    "inspect": ("pt2mx.pt2e.cli.inspect_file:run", "print the contents of a program, a package or a language model"),
    "generate": ("pt2mx.pt2e.cli.generate:run", "continue prompts with a quantized language model"),
    "perplexity": ("pt2mx.pt2e.cli.perplexity:run", "measure the perplexity of language models on a text"),
    "eval": ("pt2mx.pt2e.cli.eval:run", "evaluate a quantized language model on tasks of lm-eval"),
    "export-onnx": ("pt2mx.pt2e.cli.export_onnx:run", "write an exported program as an ONNX file"),
    "export-executorch": ("pt2mx.pt2e.cli.executorch:run", "write an exported program as an ExecuTorch file"),
    "save-checkpoint": ("pt2mx.pt2e.cli.checkpoints:run_save", "write a checkpoint that transformers loads"),
    "convert-checkpoint": ("pt2mx.pt2e.cli.checkpoints:run_convert", "quantize a checkpoint file by file"),
    "card": ("pt2mx.pt2e.cli.card:run", "print or write the model card of a folder, for the Hub"),
    "recipes": ("pt2mx.pt2e.cli.recipes:run", "list, show and check recipes"),
    "formats": ("pt2mx.pt2e.cli.formats:run", "print the table of element formats"),
    "conformance": ("pt2mx.pt2e.cli.conformance:run", "check implementations of the formats, exactly"),
    "doctor": ("pt2mx.pt2e.cli.doctor:run", "list what is installed, what is missing, and how to repair it"),
    "demo": ("pt2mx.pt2e.cli.demo:run", "quantize pretrained models with three recipes, and compile them"),
    "completion": ("pt2mx.pt2e.cli.completion:run", "print the completion script of a shell"),
}
#: the first command of each group in `--help` -> its heading
GROUPS = {
    "quantize": "quantize a model",
    "compile": "compile, run and look into files",
    "generate": "use a quantized language model",
    "export-onnx": "write for other engines",
    "recipes": "look up",
    "doctor": "set up",
}

#: the exit status where the output pipe is closed (SIGPIPE)
_BROKEN_PIPE = 141
_STATUSES = """\
exit status: 0 done, 1 `pt2mx doctor` found a fault, 2 bad input or output that cannot be written (stderr says why),
             130 interrupted. Results go to stdout, stages and notes to stderr.
`pt2mx COMMAND --help` ends with examples. Begin with `pt2mx doctor`."""


def command_parser() -> Parser:
    """Return the parser of the command line."""
    return make_parser(COMMANDS, GROUPS, _STATUSES)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the command's arguments; by default the arguments of the process.

    Returns:
        The exit status: 0; 2 for bad input; 130 after Ctrl-C; 141 where the output pipe is closed; 1 from
        `pt2mx doctor` where the flow cannot run.

    Raises:
        SystemExit: for `--help`, `--version` and a command line that argparse refuses.

    Example:
        >>> from pt2mx.pt2e.cli.command import main
        >>> main(["run", "no_such_package.pt2"])  # the error goes to stderr
        2
    """
    options = command_parser().parse_args(arguments)
    with record_sigint() as interrupts:
        try:
            check_usage(options)
            return _run(options, interrupts)
        except BrokenPipeError:
            _discard_stdout()
            return _BROKEN_PIPE
        except (Exception, KeyboardInterrupt) as error:
            interrupted = interrupts or isinstance(error, KeyboardInterrupt)
            if not interrupted and not isinstance(error, MXError | ImportError):
                raise
            if options.traceback:
                traceback.print_exception(error)
            if interrupted:
                print(MESSAGE, file=sys.stderr)
                return INTERRUPTED
            advice = "; `pt2mx doctor` says how to repair it" if isinstance(error, ImportError) else ""
            # the message of another library in it may have several lines
            print(f"pt2mx: error: {' '.join(str(error).split())}{advice}", file=sys.stderr)
            return BAD_INPUT


def _run(options: argparse.Namespace, interrupts: list[int]) -> int:
    """Run the command and print its result. With --json all other output goes to stderr."""
    if sys.stdout is None:
        raise MXError("stdout is closed: there is no place for the result")
    with only_result_on_stdout() if options.json else nullcontext(), warnings_as_notes():
        _import_files(getattr(options, "imports", None) or ())
        result = options.run(options)
    if interrupts:  # code that was running may have caught the KeyboardInterrupt
        raise KeyboardInterrupt
    try:
        if result is not None and (options.json or result.text):
            print(result.to_json() if options.json else result.text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk
        _discard_stdout()
        raise MXError(f"cannot write the result to stdout: {error.strerror}") from None
    if result is not None and result.error is not None:
        raise result.error
    return 0 if result is None else result.status


def _import_files(paths: Iterable[str]) -> None:
    """Run Python files of the user, which define custom operators."""
    for path in paths:
        from pt2mx.pt2e.files.python_file import import_file
        from pt2mx.pt2e.files.user_errors import user_errors

        with user_errors(f"import {path!r}"):
            import_file(path)


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
