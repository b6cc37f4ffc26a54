"""Print the progress of a command on stderr: its stages, notes and warnings.

The first stage is to import torch, so this module imports nothing that takes seconds.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_begun = time.perf_counter()
#: when the last line was printed
_last_line = [_begun]
#: the folder of the package
_PACKAGE = Path(__file__).parents[2]


def note(text: str) -> None:
    """Print a line on stderr, above a progress bar."""
    _print(f"pt2mx: {text}")


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print the warnings of the block as notes: the name of the package that warns replaces the line of its source."""
    previous = warnings.formatwarning
    warnings.formatwarning = _formatted
    try:
        yield
    finally:
        warnings.formatwarning = previous


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as one line, `transformers: warning: ...`; a warning of the user's code begins with its file."""
    parts = Path(filename).parts
    installed = next((i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")), None)
    if Path(filename).is_relative_to(_PACKAGE):
        owner = "pt2mx"
    else:
        owner = Path(filename).name if installed is None else parts[installed + 1].removesuffix(".py")
    return f"{owner}: warning: {' '.join(str(message).split())}\n"


def stage_line(name: str) -> None:
    """Print the seconds since the process began, and the stage that begins."""
    _print(f"[{time.perf_counter() - _begun:6.1f} s] {name}")


@contextmanager
def heartbeat(seconds: float = 10) -> Iterator[None]:
    """Print a line on stderr whenever the block has printed no stage for some seconds."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.2):
            if time.perf_counter() - _last_line[0] >= seconds:
                stage_line("...")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _print(line: str) -> None:
    """Print a line on stderr, above a progress bar, which only an imported tqdm can have made."""
    _last_line[0] = time.perf_counter()
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        print(line, file=sys.stderr, flush=True)
    else:
        bars.write(line, file=sys.stderr)


class Progress:
    """The stages of a command, each announced on stderr as it begins.

    Args:
        stages: their number.
        first: the name of the first stage, which begins at once; None: no stage begins yet.
    """

    def __init__(self, stages: int, first: str | None = "load") -> None:
        self._stages = stages
        self._begun: list[tuple[str, float]] = []
        self._end: float | None = None
        if first is not None:
            self.begin(first)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def begin(self, name: str) -> None:
        """End the current stage and begin the stage `name`."""
        self._begun.append((name, time.perf_counter()))
        stage_line(f"{len(self._begun)}/{self._stages} {name}")

    def end(self) -> None:
        """End the last stage."""
        self._end = self._end or time.perf_counter()

    def times(self) -> dict[str, float]:
        """Return the seconds of each stage until now; stages of the same name are added up."""
        ends = [*(begun for _, begun in self._begun[1:]), self._end or time.perf_counter()]
        seconds: dict[str, float] = {}
        for (name, begun), end in zip(self._begun, ends, strict=True):
            seconds[name] = seconds.get(name, 0.0) + end - begun
        return seconds

    def seconds(self) -> str:
        """Return the seconds of each stage until now, as a line of text."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.times().items())
