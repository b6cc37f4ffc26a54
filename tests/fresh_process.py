"""Run programs in separate processes, forked from a process that has only imported torch: importing torch takes longer
than most programs."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch._dynamo"])


class Finished(NamedTuple):
    """The exit status of a program, and what it printed on stdout and stderr."""

    status: int | None
    out: str
    err: str


def run_program(
    code: str,
    name: str,
    folder: Path,
    warning_filters: Sequence[tuple] = (),
    arguments: Sequence[str] = (),
    output: Path | None = None,
) -> Finished:
    """Run a program in a separate process.

    Args:
        code: the program.
        name: its file name in tracebacks.
        folder: the working folder of the process.
        warning_filters: arguments of `warnings.filterwarnings`, a tuple for each call.
        arguments: the arguments of the command line, after the program's name.
        output: the folder of the files for its output; by default `folder`.
    """
    out, err = ((output or folder) / f"{stream}.txt" for stream in ("stdout", "stderr"))
    process = _FORKS.Process(target=_run, args=(code, [name, *arguments], folder, out, err, warning_filters))
    process.start()
    process.join()
    return Finished(process.exitcode, out.read_text(), err.read_text())


def run_file(path: Path) -> str:
    """Run a Python file in a process of its own; return what it printed."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run_program(code, "-c", path.parent, arguments=[str(path)])
    assert done.status == 0, done.err
    return done.out


def _run(code: str, argv: list[str], folder: Path, out: Path, err: Path, warning_filters: Sequence[tuple]) -> None:
    sys.argv = argv
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    for arguments in warning_filters:
        warnings.filterwarnings(*arguments)
    try:
        exec(compile(code, argv[0], "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
