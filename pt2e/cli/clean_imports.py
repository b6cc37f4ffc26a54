"""Imports of packages, each in a process of its own: what fails may depend on what was imported before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

#: prints the error of the import of a module as the last line: its type and its text
_PROGRAM = """\
import importlib, json, sys
try:
    importlib.import_module(sys.argv[1])
except BaseException as error:
    print(json.dumps([type(error).__name__, str(error)]))
    sys.exit(1)
"""


class FailedImport(Exception):
    """Raised for a module that is installed and does not import, with the reason."""


@contextmanager
def clean_imports(modules: Iterable[str]) -> Iterator[Mapping[str, Future[None]]]:
    """Import modules, as many at a time as the machine has processors, while the block runs.

    Args:
        modules: their names, those that take longest first.

    Returns:
        Module -> a future, whose result raises `FailedImport` where the module does not import.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {module: pool.submit(_import, module) for module in modules}


def _import(module: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, module]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode == 0:
        return
    if done.returncode != 1 or not done.stdout:
        raise FailedImport(f"`import {module}` ends the process with status {done.returncode}")
    kind, text = json.loads(done.stdout.splitlines()[-1])
    raise FailedImport(f"`import {module}` fails: {kind}: {' '.join(text.split())}")
