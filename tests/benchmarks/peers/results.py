"""Results of runs, which are kept so that later calls of the command show them, too."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.peers.figures import Scores


class Run(NamedTuple):
    """What identifies a result on one model: the method, its setting, the format and the seed."""

    method: str
    setting: str
    format: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.format}, {self.method}, {self.setting}, seed {self.seed}"


class Result(NamedTuple):
    """What a run reached and cost.

    Args:
        scores: "validation" and "test" -> score -> its value for each window; empty for a refusal.
        seconds: processor time, or wall time on another device.
        peak: the peak memory of the process in MB.
        processor: what it ran on, "cpu" or the name of a GPU.
        day: when it ran.
        refusal: the error of a method that does not run with this setting.
        rotates: whether linear layers rotate their inputs.
    """

    scores: dict[str, Scores]
    seconds: float
    peak: float
    processor: str
    day: str
    refusal: str = ""
    rotates: bool = False


class Results:
    """The results on one model, one file for each run.

    Args:
        folder: where the files lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, run: Run) -> Result | None:
        """Return the result of a run; None where there is none."""
        file = self._file(run)
        return Result(**json.loads(file.read_text())) if file.exists() else None

    def save(self, run: Run, result: Result) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file(run).write_text(json.dumps(result._asdict()))

    def _file(self, run: Run) -> Path:
        return self.folder / f"{'_'.join(re.sub(r'[^A-Za-z0-9]+', '-', str(part)) for part in run)}.json"
