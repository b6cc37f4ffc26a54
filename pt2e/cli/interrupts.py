"""Ctrl-C ends the command `pt2mx` with one line and the status that shells have for it.

Imported first, this module sees to it before anything is imported that takes seconds. It imports nothing of that kind.
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
def noted_interrupts() -> Iterator[list[int]]:
    """Collect the interrupts that come: code in C++ may make another error of a KeyboardInterrupt."""
    seen: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if not _may_be_interrupted():
        yield seen
        return
    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def end_at_interrupts() -> None:
    """Have Ctrl-C end the process at once from here on: there is nothing to clean up."""

    def end(number: int, frame: object) -> None:
        os.write(2, f"{MESSAGE}\n".encode())
        os._exit(INTERRUPTED)

    if _may_be_interrupted():
        signal.signal(signal.SIGINT, end)


def _may_be_interrupted() -> bool:
    """False in a thread, where Python takes no signals, and in a process that was started to ignore them, as a shell
    starts its background jobs."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def is_command() -> bool:
    """True if this process is the script `pt2mx`, or `python -m pt2mx`, which has that name while pt2mx is imported."""
    arguments = sys.argv or [""]
    name = sys.orig_argv[-len(arguments)] if arguments[0] == "-m" else os.path.basename(arguments[0])
    return name.removesuffix(".exe") in ("pt2mx", "-mpt2mx")


if is_command():
    end_at_interrupts()
