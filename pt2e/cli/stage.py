"""Stages of a command: each is named on stderr as it begins, and what goes wrong in it becomes one line for the user.

The first stage is to import torch, so this module imports nothing that takes seconds.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from pt2mx.errors import MXError

_begun = time.perf_counter()
#: the folder of the package
_OWN = Path(__file__).parents[2]


@contextmanager
def user_errors(what: str, instead: str = "") -> Iterator[None]:
    """Turn what code of others (a factory, a model, export) raises in the block into one line for the user.

    Args:
        what: what the block does, as in "could not load the model".
        instead: the way that works where the block fails.

    Raises:
        MXError: for any exception of the block; an MXError passes as it is.
    """
    try:
        yield
    except MXError:
        raise
    except Exception as error:
        from pt2mx.pt2e.cli.error_text import one_line  # imports torch

        raise MXError(f"could not {what}: {one_line(error)}" + (f"; {instead}" if instead else "")) from error


def note(text: str) -> None:
    """Print a line on stderr that is no result, above a progress bar."""
    _print(f"pt2mx: {text}")


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Have warnings that are printed in the block look as a command's notes do, signed by the package that warns:
    Python's name a line of its source."""
    previous = warnings.formatwarning
    warnings.formatwarning = _formatted
    try:
        yield
    finally:
        warnings.formatwarning = previous


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as one line: `transformers: warning: ...`; of the user's code with its file."""
    parts = Path(filename).parts
    installed = next((i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")), None)
    if Path(filename).is_relative_to(_OWN):
        owner = "pt2mx"
    else:
        owner = Path(filename).name if installed is None else parts[installed + 1].removesuffix(".py")
    return f"{owner}: warning: {' '.join(str(message).split())}\n"


def stage_line(name: str) -> None:
    """Print a line on stderr: the seconds since the process began, and the stage that begins."""
    _print(f"[{time.perf_counter() - _begun:6.1f} s] {name}")


def _print(line: str) -> None:
    """Print a line on stderr, above a progress bar: there is none where tqdm is not imported."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        print(line, file=sys.stderr, flush=True)
    else:
        bars.write(line, file=sys.stderr)


class Stages:
    """The stages of a command. Each has a line on stderr when it begins, on any output.

    Args:
        stages: their number.
        first: the name of the first one, which begins now; None: none does.
    """

    def __init__(self, stages: int, first: str | None = "load") -> None:
        self._stages = stages
        self._begun: list[tuple[str, float]] = []
        self._end: float | None = None
        if first is not None:
            self.begin(first)

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.update()

    def begin(self, name: str) -> None:
        """End a stage and begin the one called `name`."""
        self._begun.append((name, time.perf_counter()))
        stage_line(f"{len(self._begun)}/{self._stages} {name}")

    def update(self) -> None:
        """End the last stage."""
        self._end = self._end or time.perf_counter()

    def times(self) -> dict[str, float]:
        """Return the seconds of each stage until now, in which stages of one name are one."""
        ends = [*(begun for _, begun in self._begun[1:]), self._end or time.perf_counter()]
        found: dict[str, float] = {}
        for (name, begun), end in zip(self._begun, ends, strict=True):
            found[name] = found.get(name, 0.0) + end - begun
        return found

    def seconds(self) -> str:
        """Return the seconds of each stage until now, as a line of text."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.times().items())
