"""The command `pt2mx doctor`: what is installed, what is missing, and the command that mends it.

It runs before torch is imported, which may be what is missing.
"""

from __future__ import annotations

import argparse
import logging
import platform
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError

from pt2mx.pt2e.cli.clean_imports import FailedImport, clean_imports
from pt2mx.pt2e.cli.doctor_checks import CHECKS, Check, NotNeeded
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.repairs import repair
from pt2mx.pt2e.cli.result import Result
from pt2mx.version import __version__

#: the exit status where the flow cannot run
BROKEN = 1
#: longest reason in a row
_LONGEST = 200


def run(options: argparse.Namespace) -> Result:
    stages = Progress(len(CHECKS), first=None)
    rows = []
    with clean_imports(_modules()) as imports:
        for group, checks in CHECKS.items():
            stages.begin(f"look at {group}")
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


def _modules() -> list[str]:
    """Return the modules to import: the last checks have those that take longest."""
    return [module for checks in CHECKS.values() for check in checks for module in check.imports][::-1]


def _row(check: Check, imports: Mapping[str, Future[None]]) -> dict[str, object]:
    """A check as JSON has it: its status is "ok", "missing", "broken", "not needed" or "unknown"."""
    row = {"name": check.name, "purpose": check.purpose, "needed": check.needed, "mend": None}
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)  # imports that talk
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
            mend = repair(check.imports[module], str(error))
            return {**row, "status": "broken", "found": _reason(error, mend), "mend": mend}
        return {**row, "status": "missing", "found": _reason(error, check.mend), "mend": check.mend}
    finally:
        logging.disable(previous)


def _reason(error: Exception, mend: str) -> str:
    if isinstance(error, PackageNotFoundError):
        return f"{error.name} is not installed"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name.partition('.')[0]} is not installed"
    text = " ".join(str(error).split()).removesuffix(f": {mend}") or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _line(row: dict[str, object]) -> str:
    line = f"{row['status']:<12}{row['name']:<14}{row['found']}"
    return line if row["mend"] is None else f"{line}\n{'':26}for {row['purpose']}: {row['mend']}"
