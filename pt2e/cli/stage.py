"""Stages of a command: each has a name, and what goes wrong in it becomes one line for the user."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.error_text import one_line


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Code of others runs here (a factory, a model, export): what it raises becomes one line for the user."""
    try:
        yield
    except MXError:
        raise
    except Exception as error:
        raise MXError(f"could not {what}: {one_line(error)}") from error


def note(text: str) -> None:
    """Tell the user what is no result: on stderr, past a progress bar."""
    tqdm.write(f"pt2mx: {text}", file=sys.stderr)


def progress_bar(stages: int) -> tqdm:
    """A bar over that many stages, the first being to load; none where stderr is no terminal."""
    return tqdm(total=stages, desc="load", disable=None, file=sys.stderr)


def advance(progress: tqdm, name: str) -> None:
    """The stage before is done, and the one called `name` begins."""
    progress.update()
    progress.set_description(name)
