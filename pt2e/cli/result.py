"""The result of a command: text for people, data for programs (`--json`)."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """The result of a command, which `main` prints: the text, or with `--json` the data.

    Args:
        text: the lines for people.
        data: name -> what `json.dumps` takes.
        status: the exit status.
    """

    text: str
    data: dict[str, object]
    status: int = 0

    def to_json(self) -> str:
        """Return the data as one JSON object; null stands for a number that is not finite."""
        return json.dumps(_finite(self.data), indent=1, allow_nan=False)


@contextmanager
def result_alone() -> Iterator[None]:
    """Have what is printed in the block go to stderr, also by other processes and by code in C++, so that the result
    stands alone on stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
