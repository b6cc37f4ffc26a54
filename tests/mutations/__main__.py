"""Put each fault into a copy of the last commit, and run the tests until one fails.

The tests that have the name of the faulty file run first, then those of its folder, then the suite, `make test`'s or
with `--all` `make test-all`'s. The faults that no test finds are listed last; each needs a test.

    python -m tests.mutations [--only TEXT] [--jobs 2] [--all]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.faults import FAULTS, ROOT, Fault

#: seconds for the tests of a fault, some of which make a loop endless
_LIMIT = 5400


def main() -> None:
    """Print where each fault was found, and exit with the number of those that were not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="the faults of files whose path holds TEXT")
    parser.add_argument("--jobs", type=int, default=2, help="copies in which faults are tried at a time")
    parser.add_argument("--all", action="store_true", help="with the tests that only `make test-all` runs")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.path]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copy = Path(folder) / f"copy{number}"
            subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
            copies.put(copy)

        def found(fault: Fault) -> str | None:
            copy = copies.get()
            try:
                return _found(fault, copy, options.all)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(options.jobs) as pool:
            for fault, (test, seconds) in zip(
                faults, pool.map(lambda fault: _timed(found, fault), faults), strict=True
            ):
                missed += test is None
                print(
                    f"{fault.path}: {fault.before}  ->  {fault.after}\n    {test or 'MISSED'} ({seconds:.0f} s)",
                    flush=True,
                )
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    sys.exit(missed)


def _timed(found, fault: Fault) -> tuple[str | None, float]:
    start = time.monotonic()
    return found(fault), time.monotonic() - start


def _found(fault: Fault, copy: Path, everything: bool) -> str | None:
    """Return the first test that fails with the fault; None if none does."""
    path = copy / fault.path
    sound = path.read_text(encoding="utf-8")
    path.write_text(fault.changed(copy), encoding="utf-8")
    try:
        for tests in _stages(fault, copy):
            if failed := _first_failure(copy, tests, everything):
                return failed
        return None
    finally:
        path.write_text(sound, encoding="utf-8")


def _stages(fault: Fault, copy: Path) -> list[list[str]]:
    """Return the tests in the order in which they run: the file's, the folder's, all."""
    path = Path("tests") / fault.path
    own = sorted(copy.glob(f"tests/**/test_{path.stem}.py"))
    folder = copy / (path.parent.parent if path.parent.name == "src" else path.parent)
    stages = [own, [folder] if folder.exists() else []]
    return [[str(one.relative_to(copy)) for one in stage] for stage in stages if stage] + [["tests"]]


def _first_failure(copy: Path, tests: list[str], everything: bool) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    if everything:
        command += ["-m", "not cuda"]
    paths = os.pathsep.join([str(copy), str(copy / "tests" / "conformance")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return f"{' '.join(tests)}: no end after {_LIMIT} s"
    if run.returncode == 0:
        return None
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0] if failures else (run.stdout + run.stderr)[-500:]


if __name__ == "__main__":
    main()
