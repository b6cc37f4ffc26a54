"""Stages of a command: each has a name, and what goes wrong in it becomes one line for the user."""

import sys
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


def progress_bar(stages: int) -> tqdm:
    """Return a bar over that many stages, the first being to load. It shows if stderr is a terminal."""
    return tqdm(total=stages, desc="load", disable=None, file=sys.stderr)


def advance(progress: tqdm, name: str) -> None:
    """End a stage and begin the one called `name`."""
    progress.update()
    progress.set_description(name)
