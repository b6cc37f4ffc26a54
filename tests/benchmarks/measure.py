"""Shared parts of the benchmarks: the allocator, timing, the table, and the line that names the hardware."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

import pt2mx
from pt2mx.pt2e.report.speed import processor_name

_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "99999999999",
    "MALLOC_TOP_PAD_": "268435456",
}

Row = dict[str, object]


def keep_heap(module: str) -> None:
    """Restart `module` with a glibc allocator that keeps its heap. Otherwise page faults of fresh memory dominate the
    times."""
    if any(os.environ.get(name) != value for name, value in _ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **_ALLOCATOR})


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    call()
    return clock() - start


def medians_in_turns(
    calls: Sequence[Callable[[], object]],
    repeats: int,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the median time of each call, in seconds of `clock`. The calls take turns, so that other load affects all;
    `before` runs before each, and its time does not count."""
    rounds = [[(before(), timed(call, clock))[1] for call in calls] for _ in range(repeats + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def gpu_medians_in_turns(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median time on the device of each call. All calls are queued together, so that none waits for the
    host. They take turns, because matmuls of many rows took up to 8% longer at the end of a run than at first."""
    rounds = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls] for _ in range(repeats + 5)]
    for events in rounds:
        for call, (start, end) in zip(calls, events, strict=True):
            start.record()
            call()
            end.record()
    torch.cuda.synchronize()
    return [
        statistics.median(start.elapsed_time(end) for start, end in events) / 1e3
        for events in zip(*rounds[5:], strict=True)
    ]


def run_formats(
    module: str,
    description: str | None,
    measured: Callable[..., Iterator[Row]],
    has_results_dtype: bool = False,
    devices: Sequence[str] = ("cpu", "cuda"),
) -> None:
    """Print the rows of `measured(device, spec, repeats)`, or of `measured(device, spec, repeats, dtype)` for a
    benchmark with a dtype of results, for the options of the command line."""
    keep_heap(module)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=devices, default="cpu")
    parser.add_argument("--format", default="mxfp8")
    if has_results_dtype:
        parser.add_argument("--results", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = [getattr(torch, options.results)] if has_results_dtype else []
    report(list(measured(options.device, pt2mx.parse(options.format), options.repeats, *dtype)))


def report(rows: list[Row], header: Sequence[str] | None = None, as_json: bool = False) -> None:
    """Print the columns of `header`, or of the first row, and the hardware: a table, or all as one JSON object."""
    if as_json:
        print(json.dumps({"hardware": hardware(), "rows": rows}, indent=1))
        return
    print_table(rows, header or tuple(rows[0]))
    print(hardware())


def print_table(rows: list[Row], header: Sequence[str]) -> None:
    cells = [tuple(header)]
    for row in rows:
        cells.append(tuple(_text(row.get(key, "")) for key in header))
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:#.3g}" if abs(value) < 100 else f"{value:.0f}"


def hardware() -> str:
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{processor_name()}, {torch.get_num_threads()} threads{gpu}, torch {torch.__version__}"
