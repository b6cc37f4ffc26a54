"""Add the rows of kept results to the recorded rows of a model, whose results need not be kept any more."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.peers.methods import METHODS
from tests.benchmarks.peers.outcomes import OURS, OVER
from tests.benchmarks.peers.results import Run

#: the columns of a row that two runs of one setting may differ in
_COST = "seconds", "peak MB", "on"


def with_recorded(entry: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `measured.json` with the recorded settings that it lacks, and the best ones of both.

    A difference from pt2mx is left out unless it is from the setting of pt2mx that is best now.

    Raises:
        ValueError: where the recorded windows are others.
    """
    for key in ("windows", "float"):
        if entry[key] != recorded[key]:
            raise ValueError(f"the recorded windows are others: {key} is {recorded[key]}, now {entry[key]}")
    known = {**_by_run(recorded), **_by_run(entry)}
    known = {run: known[run] for run in _runs(known) if run in known}
    rows = [row for row in known.values() if isinstance(row, dict)]
    best = _best(rows, [*recorded["best"], *entry["best"]])
    ours, parts = _ours(best), [(part["all"], _ours(part["best"])) for part in (recorded, entry)]
    stale = [row for made, others in parts for row in made if others.get(row["format"]) != ours.get(row["format"])]

    def current(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{key: cell for key, cell in row.items() if key != OVER or row not in stale} for row in rows]

    refusals = {run: error for run, error in known.items() if isinstance(error, str)}
    return {**entry, "best": current(best), "all": current(rows), "refusals": refusals}


def _by_run(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row or the refusal of each run."""
    return {str(Run(row["method"], row["setting"], row["format"])): row for row in entry["all"]} | entry["refusals"]


def _runs(known: Mapping[str, Any]) -> list[str]:
    """Return the runs of all methods and settings in the formats of the known ones, in the order of the tables."""
    formats = dict.fromkeys(run.partition(", ")[0] for run in known)
    return [
        str(Run(method, setting, name))
        for name in formats
        for method in METHODS
        for setting in METHODS[method].settings
    ]


def _best(rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the row of each method and format whose loss on the validation inputs is lowest.

    Of equal ones, the digits that a row lacks chose those that were best before.
    """
    chosen: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (float(row["validation"]), row not in before)):
        chosen.setdefault((row["format"], row["method"]), row)
    return [row for row in rows if chosen[row["format"], row["method"]] is row]


def _ours(best: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of the best setting of this project in each format."""
    rows = {row["format"]: row for row in best if row["method"] == OURS}
    return {name: {key: cell for key, cell in row.items() if key not in (OVER, *_COST)} for name, row in rows.items()}
