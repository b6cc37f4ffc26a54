"""The speed of models that take turns: medians of rounds, their intervals, and how they compare with float ones."""

from __future__ import annotations

import contextlib
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pt2mx.analysis.tables import ratio_text, text_table
from pt2mx.pt2e.files.user_errors import one_line

#: the dtypes of the float models that others are compared with, the faster peer first
FLOATS = ("bfloat16", "float32")
#: what the rows of float models are
_BESIDE = "bfloat16 and float32: the model without quantization, compiled in the same way"
#: rounds of a measurement, and the least seconds of each model in a round
ROUNDS, _SECONDS = 9, 0.1


class Interval(NamedTuple):
    """The median of rounds, and the second lowest and second highest: of nine rounds, a 96 % interval of the median."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Interval:
        """Return the interval of some numbers, at least two."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[1], ordered[-2])


@dataclass(frozen=True)
class Speed:
    """Times of models that took turns. `str` is a table, which says what is slower.

    Args:
        rounds: name -> seconds of a call in each round. In a round the models run one after the other, so that other
            load on the machine affects all of them. Float models have the names of `FLOATS`.
        failures: name -> the reason for which a model was not timed.
        processor: the name of the processor that ran them.
        threads: the number of torch's threads.
    """

    rounds: dict[str, list[float]]
    failures: dict[str, str] = field(default_factory=dict)
    processor: str = ""
    threads: int = 1

    def milliseconds(self, name: str) -> Interval:
        """Return the milliseconds of a call; NaN for a model that was not timed."""
        if name not in self.rounds:
            return Interval(math.nan, math.nan, math.nan)
        return Interval.of([1e3 * seconds for seconds in self.rounds[name]])

    def times_as_long(self, name: str, other: str) -> Interval:
        """Return the time of a model over that of another, from the ratio of each round."""
        pairs = zip(self.rounds[name], self.rounds[other], strict=True)
        return Interval.of([seconds / of_other for seconds, of_other in pairs])

    def verdict(self, name: str) -> str:
        """Return how a model compares with the float ones, such as "1.3x slower than bfloat16"; "" for a float one.

        Two models are about as fast where the interval of their ratio holds 1.
        """
        if name in FLOATS or name not in self.rounds:
            return ""
        texts = []
        for other in FLOATS:
            if other in self.rounds:
                ratio = self.times_as_long(name, other)
                known = 1 / ratio.median if ratio.low > 1 or ratio.high < 1 else 1.0
                texts.append(
                    ratio_text(known, f"faster than {other}", f"slower than {other}", f"about as fast as {other}")
                )
        return ", ".join(texts)

    @property
    def method(self) -> str:
        """Return how and where the times were measured, and what the rows of float models are."""
        beside = "" if set(FLOATS).isdisjoint(self.rounds) else f";\n{_BESIDE}"
        return (
            f"a call: the median of {ROUNDS} rounds in turns, and its 96 % interval; {self.processor}, "
            f"{self.threads} thread{'s' * (self.threads != 1)}, torch {torch.__version__}{beside}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the method, the processor, the threads and a row for each model; None means not measured."""
        rows: list[dict[str, Any]] = []
        for name in self.rounds:
            ratios = {other: self.times_as_long(name, other)._asdict() for other in FLOATS if other in self.rounds}
            times = {"milliseconds": self.milliseconds(name)._asdict(), "times_as_long": ratios}
            rows.append({"name": name, **times, "note": self.verdict(name)})
        for name, reason in self.failures.items():
            rows.append({"name": name, "milliseconds": None, "times_as_long": {}, "note": reason})
        return {"method": self.method, "processor": self.processor, "threads": self.threads, "rows": rows}

    def __str__(self) -> str:
        table, notes = [("", "ms", "low", "high")], [""]
        for row in self.to_dict()["rows"]:
            times = row["milliseconds"] or dict.fromkeys(Interval._fields)
            table.append((row["name"], *("" if ms is None else f"{ms:.3g}" for ms in times.values())))
            notes.append(row["note"])
        lines = text_table(table, left=1).splitlines()
        noted = [f"{line}  {note}" if note else line for line, note in zip(lines, notes, strict=True)]
        return "\n".join([*noted, self.method])


class SpeedTest:
    """Compile models one after the other, then time them in turns."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._calls: dict[str, Callable[[], object]] = {}
        self._failures: dict[str, str] = {}

    @torch.no_grad()
    def add(self, name: str, make: Callable[[], Callable[[], object]]) -> None:
        """Add the call that `make` returns, and call it once, which may compile. If this fails, its row says why."""
        try:
            call = make()
            call()
        except Exception as error:
            self._failures[name] = one_line(error)
        else:
            self._calls[name] = call

    def run(self, clock: Callable[[], float] = time.perf_counter) -> Speed:
        """Time all calls in turns."""
        rounds = seconds_in_turns(self._calls, clock)
        return Speed(rounds, self._failures, processor_name(self._device), torch.get_num_threads())


@torch.no_grad()
def seconds_in_turns(
    calls: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return name -> the seconds of a call in each of `ROUNDS` rounds, in which the calls take turns.

    Short calls are repeated within a round, to last `_SECONDS` of `clock`; a GPU queues them.
    """
    counts = {name: max(1, math.ceil(_SECONDS / _seconds(call, 1, clock))) for name, call in calls.items()}
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            rounds[name].append(_seconds(call, counts[name], clock) / counts[name])
    return rounds


def _seconds(call: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    """Return the seconds of several calls, including the work of the device."""
    begin = clock()
    for _ in range(count):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - begin


def processor_name(device: torch.device | str = "cpu") -> str:
    """Return the name of a GPU, or of the CPU with the instructions that torch uses."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    # platform reads less than that on Linux
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
