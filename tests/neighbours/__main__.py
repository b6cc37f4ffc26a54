"""Each environment with its versions and what passed, as a Markdown table in `tests/neighbours/results.md`.

    python -m tests.neighbours [--whole] [NAME ...]

Names of environments (`tests/neighbours/table.py`) run those alone, and the rows of the others stay. An environment
with a newer torch takes 7 GB in the temporary folder (TMPDIR) while it runs. Where the newest versions are those of
`constraints.txt`, nothing runs, for `make test` runs the same.
"""

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.neighbours.run import run
from tests.neighbours.table import ENVIRONMENTS

#: the outcomes, which later runs of other environments keep
RESULTS = Path(__file__).with_name("results.json")
TABLE = RESULTS.with_suffix(".md")
_HEAD = """\
# Newest neighbours

`make neighbours` writes this table. Packages that are not named have the versions of `constraints.txt`. As pinned: the
newest version is the one of `constraints.txt`, with which `make test` runs these tests.
"""
_COLUMNS = ("environment", "versions", "tests", "passed", "failed", "skipped", "Python", "date")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ENVIRONMENTS), metavar="NAME", help="by default all")
    parser.add_argument("--whole", action="store_true", help="run all tests in each environment")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"no environment {sorted(unknown)[0]!r}; there are {', '.join(ENVIRONMENTS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False
    for name in options.names:
        outcome = run(ENVIRONMENTS[name], options.whole)
        failed |= bool(outcome.failed)
        results[name] = {
            **outcome._asdict(),
            "tests": "all" if options.whole else "core",
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        TABLE.write_text(table(results))
    print(TABLE.read_text(), end="")
    return int(failed)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the outcomes in the order of the environments, and the tests that failed."""
    rows, failures = [], []
    for name in (name for name in ENVIRONMENTS if name in results):
        row = results[name]
        moved = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        counts = (row["passed"], len(row["failed"]), row["skipped"]) if row["passed"] is not None else ["as pinned"] * 3
        rows.append(_cells((name, moved, row["tests"], *counts, row["python"], row["date"])))
        failures += [f"- {name}: {test}" for test in row["failed"]]
    lines = [_HEAD, _cells(_COLUMNS), _cells(["---"] * len(_COLUMNS)), *rows, *([""] if failures else []), *failures]
    return "\n".join(lines) + "\n"


def _cells(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
