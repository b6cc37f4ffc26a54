"""Write output files: each is written to a temporary name and renamed when complete."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import secrets
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pt2mx.errors import MXError

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: errors of a full disk, of a quota, and of a limit of files
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output(path: object, suffixes: tuple[str, ...] = ()) -> None:
    """Raise an MXError, before any work is done, if `path` cannot be written or has none of the `suffixes`.

    Without `suffixes` any name will do; a device may always have any name.
    """
    with _errors_of_writing(path):
        spelled, target = _spelled(path), _target(path)
        # check the folder as spelled, too: for `nowhere/../file`, and for `file/`, which names a folder
        folders = (os.path.dirname(spelled) or ".", target.parent)
        if not all(os.path.isdir(folder) for folder in folders) or target.is_dir():
            raise MXError(f"cannot write {str(path)!r}: it must be a file in a folder that exists")
        touched = [target] if target.exists() else []
        if not _is_device(target):
            touched.append(target.parent)
        if not all(os.access(path, os.W_OK) for path in touched):
            raise MXError(f"cannot write {str(path)!r}: no permission to; choose another place")
    if suffixes and not _is_device(target) and Path(spelled).suffix.lower() not in suffixes:
        raise MXError(f"cannot write {str(path)!r}: its name must end in {' or '.join(suffixes)}")


def check_distinct(outputs: dict[str, object], inputs: dict[str, object]) -> None:
    """Raise an MXError if an output is the same file as an input or another output, however it is spelled.

    Both map the name that the user knows, such as an option, to a path or None.
    """
    taken = {_target(path): name for name, path in inputs.items() if path is not None}
    for name, path in outputs.items():
        if path is None or _is_device(target := _target(path)):
            continue
        if target in taken:
            raise MXError(f"{taken[target]} and {name} are one file, {str(path)!r}: give each a name of its own")
        taken[target] = name


@contextmanager
def whole_file(path: object) -> Iterator[io.FileIO]:
    """Yield a binary file that replaces `path` when the block ends. If the block fails or is interrupted, the old file
    stays, and no temporary file is left.

    If `path` is a link, its target is replaced. A device, such as /dev/stdout, is written to directly.

    Raises:
        MXError: as `check_output`, and if writing fails, as on a full disk.
    """
    check_output(path)
    target = _target(path)
    device = _is_device(target)
    # in the same folder, so that it can be renamed; with the same suffix, by which torch recognizes its files
    written = target if device else target.with_name(f".{secrets.token_hex(8)}{target.suffix}")
    with _errors_of_writing(path):
        file = _File(written, "w" if device else "x")
    try:
        with file:
            try:
                yield file
            except Exception:
                with _errors_of_writing(path):
                    file.check()  # the block may have failed because of it
                raise
            with _errors_of_writing(path):
                file.check()
                if not device:
                    os.fsync(file.fileno())
        if not device:
            with _errors_of_writing(path):
                if target.exists():
                    os.chmod(written, stat.S_IMODE(target.stat().st_mode))
                os.replace(written, target)
    finally:
        if not device:
            written.unlink(missing_ok=True)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block. torch's C++ writers call Python for each write; an exception that passes
    through them ends the process."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no interrupts arrive here
        return
    interrupts: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: interrupts.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            handler(*interrupts[0])


def write_text(text: str, path: object) -> str:
    """Write `text` to `path`, if one is given, and return it.

    Raises:
        MXError: as `whole_file`.
    """
    if path is not None:
        with whole_file(path) as file:
            file.write(text.encode())
    return text


class _File(io.FileIO):
    """A file whose writes never raise, for torch's C++ writers: `check` raises the error at the end."""

    _error: OSError | None = None

    def write(self, data: Buffer) -> int:
        remaining = content = memoryview(data).cast("B")
        while remaining.nbytes and self._error is None:
            try:
                remaining = remaining[super().write(remaining) :]
            except OSError as error:
                self._error = error
        return content.nbytes

    def seek(self, *where: int) -> int:
        """Do nothing in a pipe: torch seeks back to the beginning after the last write."""
        return super().seek(*where) if self.seekable() else 0

    def check(self) -> None:
        """Raise the error of a write, if there was one."""
        if self._error is not None:
            raise self._error


@contextmanager
def folder_errors(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Raise an `MXError` that names a folder where the system refuses to write it. Other errors pass."""
    if "\0" in os.fsdecode(folder):
        raise MXError(f"cannot write to {str(folder)!r}: embedded null byte; give a folder")
    try:
        yield
    except OSError as error:
        advice = "make room there, or give another folder" if error.errno in _NO_ROOM else "give a folder"
        raise MXError(f"cannot write to {str(folder)!r}: {error.strerror or error}; {advice}") from error


@contextmanager
def _errors_of_writing(path: object) -> Iterator[None]:
    try:
        yield
    except MXError:
        raise
    except (OSError, ValueError, TypeError) as error:  # also for a name that is too long, and an object that is no path
        raise MXError(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None


def _target(path: object) -> Path:
    """Return the file behind `path` and its links; `path` itself for a device: the pipe of /dev/stdout has no path."""
    spelled = _spelled(path)
    return Path(spelled) if _is_device(Path(spelled)) else Path(os.path.realpath(spelled))


def _spelled(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path is a string or an os.PathLike object, not of type {type(path).__name__}")
    return os.fspath(path)


def _is_device(target: Path) -> bool:
    return os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target))


def json_text(data: object) -> str:
    """Return the JSON of data; numbers that are not finite become null."""
    return json.dumps(_finite(data), indent=1, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
