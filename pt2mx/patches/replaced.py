"""Replace an attribute of another library's module or class until a context ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: of the thread whose replacements are in force
_replacing = threading.RLock()


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by `replacement(attribute)`; do nothing where this version of the library lacks it.

    One thread at a time replaces attributes, so that the last one leaves the library's own behind.
    """
    with _replacing:
        before = vars(owner).get(name)
        if before is None:
            yield
            return
        setattr(owner, name, replacement(before))
        try:
            yield
        finally:
            setattr(owner, name, before)
