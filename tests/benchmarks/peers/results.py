"""Results of methods, which are kept so that later runs of the command show them, too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.peers.figures import Scores


class Result(NamedTuple):
    """What a method reached and cost.

    Args:
        scores: score -> its value for each held-out window.
        seconds: processor time, or wall time on another device.
        peak: the peak memory of the process in MB.
        processor: what it ran on, "cpu" or the name of a GPU.
        day: when it ran.
    """

    scores: Scores
    seconds: float
    peak: float
    processor: str
    day: str


class Results:
    """The results of the methods on one model, one file for each method and format.

    Args:
        folder: where the files lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, method: str, name: str) -> Result | None:
        """Return the result of a method for a format; None where there is none."""
        file = self._file(method, name)
        return Result(**json.loads(file.read_text())) if file.exists() else None

    def save(self, method: str, name: str, result: Result) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file(method, name).write_text(json.dumps(result._asdict()))

    def _file(self, method: str, name: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', method)}_{name}.json"
