"""Files that the user asks for. Each is written beside its place and moved there when it is whole."""

from __future__ import annotations

import io
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


def check_output(path: object, suffixes: tuple[str, ...] = ()) -> None:
    """`MXError` where no file can be written at `path`, or where its name ends in none of `suffixes`, if some are
    given; a device may have any name. That is better known before the work than after it."""
    with _errors_of_writing(path):
        spelled, target = _spelled(path), _target(path)
        # the folder as it is spelled, too: `nowhere/../file`, and `file/`, which names a folder
        folders = (os.path.dirname(spelled) or ".", target.parent)
        if not all(os.path.isdir(folder) for folder in folders) or target.is_dir():
            raise MXError(f"cannot write {str(path)!r}: it must be a file in a folder that exists")
        touched = [target] if target.exists() else []
        if not _is_device(target):
            touched.append(target.parent)
        if not all(os.access(place, os.W_OK) for place in touched):
            raise MXError(f"cannot write {str(path)!r}: no permission to; choose another place")
    if suffixes and not _is_device(target) and Path(spelled).suffix.lower() not in suffixes:
        raise MXError(f"cannot write {str(path)!r}: its name must end in {' or '.join(suffixes)}")


def check_distinct(outputs: dict[str, object], inputs: dict[str, object]) -> None:
    """`MXError` where a file that is to be written is another of the user's files, in whatever spelling. Both have a
    file, or None, by what the user knows it by."""
    taken = {_target(path): name for name, path in inputs.items() if path is not None}
    for name, path in outputs.items():
        if path is None or _is_device(target := _target(path)):
            continue
        if target in taken:
            raise MXError(f"{taken[target]} and {name} are one file, {str(path)!r}: give each a name of its own")
        taken[target] = name


@contextmanager
def whole_file(path: object) -> Iterator[io.FileIO]:
    """A binary file to write to, which takes the place of `path` when the block ends. If the block fails or is
    interrupted, what was at `path` stays, and nothing else is left.

    `path` may be a link: the file that it names is replaced. A device, such as /dev/stdout, is written to directly.

    Raises:
        MXError: as `check_output`, and where the file cannot be written to its end, as on a full disk.
    """
    check_output(path)
    target = _target(path)
    device = _is_device(target)
    # in the same folder, so that it can be moved; of the same suffix, by which torch knows its files
    written = target if device else target.with_name(f".{secrets.token_hex(8)}{target.suffix}")
    with _errors_of_writing(path):
        file = _File(written, "w" if device else "x")
    try:
        with file:
            try:
                yield file
            except Exception:
                with _errors_of_writing(path):
                    file.check()  # what the block met may follow from it
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
    """Ctrl-C waits for the block to end. torch's writers in C++, which call back to Python for each write, end the
    process when an exception passes through them."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # there are no interrupts here
        return
    came: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


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
    """A file whose writes do not fail, for the sake of torch's writers in C++: what went wrong is raised at the end."""

    _error: OSError | None = None

    def write(self, data: Buffer) -> int:
        rest = whole = memoryview(data).cast("B")
        while rest.nbytes and self._error is None:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self._error = error
        return whole.nbytes

    def seek(self, *where: int) -> int:
        """Nowhere in a pipe: torch goes back to the beginning when all is written."""
        return super().seek(*where) if self.seekable() else 0

    def check(self) -> None:
        """Raise the error of a write, if there was one."""
        if self._error is not None:
            raise self._error


@contextmanager
def _errors_of_writing(path: object) -> Iterator[None]:
    try:
        yield
    except MXError:
        raise
    except (OSError, ValueError, TypeError) as error:  # also a name that is too long, and what is no path
        raise MXError(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None


def _target(path: object) -> Path:
    """The file that `path` names, through links; a device itself: no path leads to the pipe behind /dev/stdout."""
    spelled = _spelled(path)
    return Path(spelled) if _is_device(Path(spelled)) else Path(os.path.realpath(spelled))


def _spelled(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path is a string or an os.PathLike object, not of type {type(path).__name__}")
    return os.fspath(path)


def _is_device(target: Path) -> bool:
    return os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target))
