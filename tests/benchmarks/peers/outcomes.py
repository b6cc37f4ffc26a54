"""The results of a setting over its seeds, the choice of the best setting, and the rows of the tables."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.benchmarks.measure import Row
from tests.benchmarks.peers.figures import Metric, Values, difference_text, mean
from tests.benchmarks.peers.results import Result, Run

#: the method that others are compared with
OURS = "pt2mx"
#: the column of the difference from its best setting
OVER = f"over {OURS}"
#: the columns of a row between the format and the figures of the test
NAMES = "method", "setting", "rotates inputs", "seeds", "validation"


class Outcome(NamedTuple):
    """The results of a setting.

    Args:
        run: the run of the first seed.
        results: one for each seed.
    """

    run: Run
    results: list[Result]

    @property
    def refusal(self) -> str:
        """The first error; empty where all seeds ran."""
        return next((result.refusal for result in self.results if result.refusal), "")

    def scores(self, part: str) -> dict[str, Values]:
        """Return the scores for "validation" or "test": score -> seed -> window."""
        return {
            score: [result.scores[part][score] for result in self.results] for score in self.results[0].scores[part]
        }


def best(outcomes: Sequence[Outcome], loss: str) -> list[Outcome]:
    """Return the setting of each method and format whose mean loss on the validation inputs is lowest.

    Args:
        outcomes: settings that ran.
        loss: the score to compare by.
    """
    chosen: dict[tuple[str, str], Outcome] = {}
    for outcome in sorted(outcomes, key=lambda outcome: mean(outcome.scores("validation")[loss])):
        chosen.setdefault((outcome.run.format, outcome.run.method), outcome)
    return [outcome for outcome in outcomes if chosen[outcome.run.format, outcome.run.method] is outcome]


def rows(outcomes: Iterable[Outcome], chosen: Iterable[Outcome], metric: Metric) -> list[Row]:
    """Return the rows of settings that ran: their figures on the test inputs.

    Args:
        outcomes: the settings to show.
        chosen: the best ones; others are compared with the one of this project.
        metric: of the model.
    """
    ours = {outcome.run.format: outcome for outcome in chosen if outcome.run.method == OURS}
    return [_row(outcome, ours.get(outcome.run.format), metric) for outcome in outcomes]


def _row(outcome: Outcome, ours: Outcome | None, metric: Metric) -> Row:
    run, first, test = outcome.run, outcome.results[0], outcome.scores("test")
    loss = f"{mean(outcome.scores('validation')[metric.loss]):.4f}"
    rotates = "yes" if first.rotates else "no"
    names = dict(zip(NAMES, (run.method, run.setting, rotates, len(outcome.results), loss), strict=True))
    row: Row = {"format": run.format, **names, **metric.cells(test)}
    if ours is not None and outcome != ours:
        row[OVER] = difference_text(test[metric.loss], ours.scores("test")[metric.loss])
    cost = {"seconds": f"{first.seconds:.0f}", "peak MB": f"{first.peak:.0f}"}
    return {**row, **cost, "on": f"{first.processor}, {first.day}"}
