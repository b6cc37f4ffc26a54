"""The command `pt2mx doctor`: what is installed, what is missing, and the command that repairs it.

It runs before torch is imported, since torch may be missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from importlib.metadata import PackageNotFoundError

from pt2mx.pt2e.cli.doctor_checks import CHECKS, Check, NotNeeded
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.version import __version__

#: the exit status where the flow cannot run
BROKEN = 1
#: longest reason in a row
_LONGEST = 200
#: imports a module; its last line is the type and the text of an error
_PROGRAM = """\
import importlib, json, sys
try:
    importlib.import_module(sys.argv[1])
except BaseException as error:
    print(json.dumps([type(error).__name__, str(error)]))
    sys.exit(1)
"""
#: builds of torch and torchvision, by the part of their version after "+"
_BUILDS = "https://download.pytorch.org/whl"


def run(options: argparse.Namespace) -> Result:
    progress = Progress(len(CHECKS), first=None)
    rows = []
    modules = [module for checks in CHECKS.values() for check in checks for module in check.imports]
    with clean_imports(reversed(modules)) as imports:  # those of the last checks are the slowest
        for group, checks in CHECKS.items():
            progress.begin(f"look at {group}")
            rows += [_row(check, imports) for check in checks]
    works = all(row["status"] == "ok" for row in rows if row["needed"])
    faults = sum(row["status"] in ("missing", "broken") for row in rows)
    verdict = "the flow can run" if works else "the flow cannot run"
    text = [
        f"pt2mx {__version__}, {platform.platform()}",
        *map(_line, rows),
        f"{verdict}; {faults or 'nothing'} of {len(rows)} missing or broken",
    ]
    data = {"pt2mx": __version__, "platform": platform.platform(), "flow_can_run": works, "checks": rows}
    return Result("\n".join(text), data, 0 if works else BROKEN)


def _row(check: Check, imports: Mapping[str, Future[None]]) -> dict[str, object]:
    """Return the outcome of a check as JSON: its status is "ok", "missing", "broken", "not needed" or "unknown"."""
    row = {"name": check.name, "purpose": check.purpose, "needed": check.needed, "mend": None}
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)  # some imports log
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, module = check.look(), ""
        for module in check.imports:
            imports[module].result()
        return {**row, "status": "ok", "found": found}
    except NotNeeded as error:
        return {**row, "status": "not needed", "found": str(error)}
    except Exception as error:  # an import of a broken package raises anything
        torch = None if check.name == "torch" or isinstance(error, PackageNotFoundError) else imports.get("torch")
        if torch is not None and torch.exception() is not None:
            return {**row, "status": "unknown", "found": "it cannot be looked at without torch"}
        if isinstance(error, FailedImport):
            repair = repair_command(check.imports[module], str(error))
            return {**row, "status": "broken", "found": _reason(error, repair), "mend": repair}
        return {**row, "status": "missing", "found": _reason(error, check.repair), "mend": check.repair}
    finally:
        logging.disable(previous)


def _reason(error: Exception, repair: str) -> str:
    if isinstance(error, PackageNotFoundError):
        return f"{error.name} is not installed"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name.partition('.')[0]} is not installed"
    text = " ".join(str(error).split()).removesuffix(f": {repair}") or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _line(row: dict[str, object]) -> str:
    line = f"{row['status']:<12}{row['name']:<14}{row['found']}"
    return line if row["mend"] is None else f"{line}\n{'':26}for {row['purpose']}: {row['mend']}"


class FailedImport(Exception):
    """Raised with the reason where an installed module does not import."""


@contextmanager
def clean_imports(modules: Iterable[str]) -> Iterator[Mapping[str, Future[None]]]:
    """Import modules while the block runs, as many at a time as the machine has processors.

    Each has a process of its own: an import may fail or succeed because of what was imported before. The result of its
    future raises `FailedImport` where it does not import.
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


def repair_command(distribution: str, reason: str) -> str:
    """Return the command that repairs a package, whose import failed for that reason: perhaps because of torchvision.

    torchvision must be of the version and the build of torch. The library of another build does not load, and the
    import fails where it registers that library's operators.
    """
    if distribution != "torchvision" and "torchvision::" not in reason:
        return f"pip install --force-reinstall {distribution}"
    torch, _, build = metadata.version("torch").partition("+")
    version = metadata.version("torchvision").partition("+")[0]
    index = f" --index-url {_BUILDS}/{build}" if build else ""
    requirements = [re.sub(r"[ ()]", "", text) for text in metadata.requires("torchvision") or ()]
    if f"torch=={torch}" in requirements:
        return f"pip install --force-reinstall --no-deps torchvision=={version}{index}"
    return f"pip install --force-reinstall torchvision torch=={torch}{index}"
