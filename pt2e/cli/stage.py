"""Stages of a command: each has a name, and what goes wrong in it becomes one line for the user."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.error_text import one_line


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Turn what code of others (a factory, a model, export) raises in the block into one line for the user.

    Args:
        what: what the block does, as in "could not load the model".

    Raises:
        MXError: for any exception of the block; an MXError passes as it is.
    """
    try:
        yield
    except MXError:
        raise
    except Exception as error:
        raise MXError(f"could not {what}: {one_line(error)}") from error


def note(text: str) -> None:
    """Print a line on stderr that is no result, above a progress bar."""
    tqdm.write(f"pt2mx: {text}", file=sys.stderr)


class Stages(tqdm):
    """A bar over stages, the first being to load. It shows if stderr is a terminal.

    Args:
        stages: their number.
    """

    def __init__(self, stages: int) -> None:
        super().__init__(total=stages, desc="load", disable=None, file=sys.stderr)
        self._begun = [("load", time.perf_counter())]

    def begin(self, name: str) -> None:
        """End a stage and begin the one called `name`."""
        self.update()
        self.set_description(name)
        self._begun.append((name, time.perf_counter()))

    def seconds(self) -> str:
        """Return the seconds of each stage until now, as a line of text."""
        ends = [*(begun for _, begun in self._begun[1:]), time.perf_counter()]
        return ", ".join(f"{name} {end - begun:.1f} s" for (name, begun), end in zip(self._begun, ends, strict=True))
