"""One environment: install it in a temporary folder, run its tests, and delete it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.neighbours.table import Environment

ROOT = Path(__file__).parents[2]
#: what pip installs with the packages that move: pt2mx with the tools of the tests, and the helper of CPU builds
_PROJECT = ("-e", f"{ROOT}[dev]", str(ROOT / "tests" / "torchvision_schemas"))


class Outcome(NamedTuple):
    """What an environment gave.

    Args:
        versions: package that moved -> its version.
        passed: the number of tests that passed; None: the versions are the pinned ones, and `make test` runs the tests.
        skipped: the number of tests that were skipped, or None.
        failed: names of the tests that failed; one reason instead if pip or pytest could not run.
    """

    versions: dict[str, str]
    passed: int | None
    skipped: int | None
    failed: tuple[str, ...]


def name_of(requirement: str) -> str:
    """Return the name of a requirement: `torch` for `torch==2.14.*`."""
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def constraints(text: str, moved: Iterable[str]) -> str:
    """Return the lines of `constraints.txt` without the packages that move."""
    names = {name_of(requirement) for requirement in moved}
    lines = text.splitlines()
    return "\n".join(line for line in lines if line.startswith("#") or name_of(line) not in names) + "\n"


def paths_of(patterns: Iterable[str]) -> list[str]:
    """Return the files and folders of the patterns, relative to the repository.

    Raises:
        ValueError: for a pattern without a file.
    """
    paths = []
    for pattern in patterns:
        matching = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        if not matching:
            raise ValueError(f"no tests are called {pattern!r}")
        paths += matching
    return paths


def outcome(report: str, versions: dict[str, str]) -> Outcome:
    """Return the outcome that a JUnit report of pytest tells."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}".removeprefix("::"))
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return Outcome(versions, passed, skipped, tuple(dict.fromkeys(failed)))


def run(environment: Environment, whole: bool = False) -> Outcome:
    """Install an environment, run its tests and delete it. Output of pip and pytest goes to stderr.

    Args:
        environment: what to install and to run.
        whole: run all tests instead of those of the environment.
    """
    with tempfile.TemporaryDirectory(prefix="pt2mx-neighbours-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        pins = (ROOT / "constraints.txt").read_text()
        if environment.tested and not whole:
            versions = _newest(python, environment.moved)
            if all(f"{name}=={version}" in pins.splitlines() for name, version in versions.items()):
                return Outcome(versions, None, None, ())
        rest = Path(folder, "constraints.txt")
        rest.write_text(constraints(pins, environment.moved))
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", rest]
        if _call(*install, *environment.moved, *_PROJECT):
            return Outcome({}, 0, 0, ("pip finds no versions that fit each other, or an installation fails",))
        return run_tests(python, environment, ["tests"] if whole else paths_of(environment.tests))


def run_tests(python: Path, environment: Environment, paths: Iterable[str]) -> Outcome:
    """Run tests in an environment that is installed."""
    versions = _installed(python, environment.moved)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=short"]
        status = _call(python, "-m", "pytest", *options, "-m", environment.marks, f"--junitxml={report}", *paths)
        if not report.exists():
            return Outcome(versions, 0, 0, (f"pytest ends with status {status}",))
        return outcome(report.read_text(), versions)


def _call(*command: str | Path) -> int:
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(list(map(str, command)), cwd=ROOT, env=environ, stdout=sys.stderr).returncode


def _newest(python: Path, moved: Iterable[str]) -> dict[str, str]:
    """Return the versions that pip would install of the packages that move."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run(
        [python, "-m", "pip", "install", *options, *moved], check=True, capture_output=True, text=True
    )
    packages = [package["metadata"] for package in json.loads(done.stdout)["install"]]
    return {package["name"]: package["version"].partition("+")[0] for package in packages}


def _installed(python: Path, moved: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that moved, without the name of their build."""
    command = [str(python), "-m", "pip", "list", "--format=json"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    known = {package["name"]: package["version"].partition("+")[0] for package in listed}
    return {name_of(requirement): known[name_of(requirement)] for requirement in moved}
