"""The log of an export, which is long where it fails: a command tells the error in one line."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr


@contextmanager
def log_of_success() -> Iterator[None]:
    """Hold back what torch logs in the block, and what is printed on stderr, until it ends; drop it where it fails.
    Where the environment has TORCH_LOGS, nothing is held back."""
    if "TORCH_LOGS" in os.environ:
        yield
        return
    held = io.StringIO()
    with ExitStack() as stack:
        for handler in _handlers():
            stack.callback(handler.setStream, handler.setStream(held))
        stack.enter_context(redirect_stderr(held))
        yield
    sys.stderr.write(held.getvalue())


def _handlers() -> list[logging.StreamHandler]:
    """Return what prints the records of torch's loggers."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    return [handler for handler in handlers if type(handler) is logging.StreamHandler]  # not those of files and traces
