"""SIGINT (Ctrl-C) ends the command `pt2mx` with one line and exit status 130.

`import pt2mx` imports this module first, so that Ctrl-C also ends the imports that take seconds. It imports none of
them itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: the exit status
INTERRUPTED = 130
MESSAGE = "pt2mx: interrupted"


@contextmanager
def record_sigint() -> Iterator[list[int]]:
    """Record each SIGINT of the block: code in C++ may turn its KeyboardInterrupt into another error."""
    seen: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if not _handles_sigint():
        yield seen
        return
    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def exit_on_sigint() -> None:
    """End the process at once at Ctrl-C: there is nothing to clean up yet."""

    def end(number: int, frame: object) -> None:
        os.write(2, f"{MESSAGE}\n".encode())
        os._exit(INTERRUPTED)

    if _handles_sigint():
        signal.signal(signal.SIGINT, end)


def _handles_sigint() -> bool:
    """Return False in a thread, where Python takes no signals, and in a process that was started to ignore SIGINT, as
    a shell starts its background jobs."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def is_command() -> bool:
    """Return True in the process of the script `pt2mx`, or of `python -m pt2mx` while it imports pt2mx."""
    arguments = sys.argv or [""]
    name = sys.orig_argv[-len(arguments)] if arguments[0] == "-m" else os.path.basename(arguments[0])
    return name.removesuffix(".exe") in ("pt2mx", "-mpt2mx")


if is_command():
    exit_on_sigint()
