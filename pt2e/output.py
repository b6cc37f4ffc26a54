"""Files that the user asks for."""

import os
from pathlib import Path

from pt2mx.errors import MXError


def check_output(path: object) -> None:
    """`MXError` where no file can be written at `path`, which is better known before the work than after it."""
    path = Path(path)
    folder = path.absolute().parent
    if not folder.is_dir() or path.is_dir():
        raise MXError(f"cannot write {str(path)!r}: it must be a file in a folder that exists")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise MXError(f"cannot write {str(path)!r}: no permission to; choose another place")


def write_text(text: str, path: object) -> str:
    """Write `text` to `path`, if one is given, and return it.

    Raises:
        MXError: as `check_output`.
    """
    if path is not None:
        check_output(path)
        Path(path).write_text(text, encoding="utf-8")
    return text
