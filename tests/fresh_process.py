"""Run programs in separate processes, forked from a process that has imported torch and torchao: importing them takes
longer than most programs."""

import atexit
import contextlib
import functools
import gc
import importlib
import logging
import os
import pickle
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
#: what most programs import, of others than pt2mx
IMPORTED = (
    *("torch", "torch._inductor.compile_fx", "torchao.quantization.pt2e.quantize_pt2e"),
    *("transformers.generation.utils", "transformers.models.llama.modeling_llama"),
)
#: what the bindings of Triton 3.9 print at the exit of a process that has called `gc.freeze`, as `serve` does
_LEAKS = re.compile(r"^nanobind: leaked .*^See https://nanobind\S*\n?", re.DOTALL | re.MULTILINE)


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
    imported: tuple[str, ...] = IMPORTED,
) -> Finished:
    """Run a program in a separate process.

    Args:
        code: the program.
        name: its file name in tracebacks.
        folder: the working folder of the process.
        warning_filters: arguments of `warnings.filterwarnings`, a tuple for each call.
        arguments: the arguments of the command line, after the program's name.
        output: the folder of the files for its output; by default `folder`.
        imported: the modules that the process has imported before.
    """
    out, err = ((output or folder).absolute() / f"{stream}.txt" for stream in ("stdout", "stderr"))
    server = _server(imported)
    request = pickle.dumps((code, [name, *arguments], folder, out, err, warning_filters))
    print(request.hex(), file=server.stdin, flush=True)
    return Finished(int(server.stdout.readline()), out.read_text(), _LEAKS.sub("", err.read_text()))


@functools.cache
def _server(imported: tuple[str, ...]) -> subprocess.Popen:
    """Start the process that programs are forked from. It ends with this one."""
    code = "import sys; sys.path[:] = sys.argv[2:]; from tests.fresh_process import serve; serve()"
    command = [sys.executable, "-c", code, ",".join(imported), *sys.path]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    atexit.register(server.communicate)  # closes its stdin, and waits
    return server


def serve() -> None:
    """Import the modules of the command line. Then run each program of stdin in a fork, and print its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()  # torchao announces extensions that are not there
        for module in sys.argv[1].split(","):
            with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
                importlib.import_module(module)
        logging.disable(logging.NOTSET)
    gc.freeze()  # a fork would copy all of these objects when it ends, which takes a second
    for line in sys.stdin:
        if not (child := os.fork()):
            _run(*pickle.loads(bytes.fromhex(line)))
            raise SystemExit
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run_file(path: Path) -> str:
    """Run a Python file in a process of its own; return what it printed."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run_program(code, "-c", path.parent, arguments=[str(path)])
    assert done.status == 0, done.err
    return done.out


def _run(code: str, argv: list[str], folder: Path, out: Path, err: Path, warning_filters: Sequence[tuple]) -> None:
    sys.argv = argv
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    for arguments in warning_filters:
        warnings.filterwarnings(*arguments)
    try:
        exec(compile(code, argv[0], "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
