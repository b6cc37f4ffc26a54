"""Read PT2 archives, the zip files of torch: exported programs and AOTInductor packages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile, ZipFile

from pt2mx.errors import MXError

#: how the names of the files in each kind of archive begin, below its root
_KINDS = {"data/aotinductor/": "package", "models/": "program"}
_ADVICE = {
    "program": "give what `pt2mx quantize` or torch.export.save wrote",
    "package": "give what `pt2mx compile` wrote",
}


def check_kind(path: object, kind: str) -> None:
    """Raise an MXError unless the file is a PT2 archive of that kind, `"program"` or `"package"`."""
    with _opened(path, _ADVICE[kind]) as archive:
        names = _records(archive)
    kinds = {other for start, other in _KINDS.items() if any(name.startswith(start) for name in names)}
    if kind not in kinds:
        actual = "".join(f", but a {other}" for other in kinds)
        raise MXError(f"{str(path)!r} is no {kind}{actual}: {_ADVICE[kind]}")


def read_record(path: object, name: str) -> bytes | None:
    """Return the content of a file in the archive, by its name below the root; None if there is none.

    Raises:
        MXError: for a file that is no archive.
    """
    with _opened(path) as archive:
        full_name = _records(archive).get(name)
        return None if full_name is None else archive.read(full_name)


def record_names(path: object) -> list[str]:
    """Return the names of the files in the archive, below its root.

    Raises:
        MXError: for a file that is no archive.
    """
    with _opened(path) as archive:
        return list(_records(archive))


def add_records(path: object, records: dict[str, bytes]) -> None:
    """Add files to an archive, by their names below its root.

    Raises:
        MXError: for a file that is no archive, and where it cannot be written.
    """
    try:
        with _opened(path, mode="a") as archive:
            root = archive.namelist()[0].partition("/")[0]
            for name, content in records.items():
                archive.writestr(f"{root}/{name}", content)
    except OSError as error:
        raise MXError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _records(archive: ZipFile) -> dict[str, str]:
    """Return the files in an archive: name below the root -> full name."""
    return {name.partition("/")[2]: name for name in archive.namelist()}


def _file(path: object, advice: str) -> Path:
    """Return the path of a file, or raise an error; that for a folder names the commands that take one."""
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        if any(Path(path).glob("program*.pt2")):
            advice = (
                "a language model, whose program writes its cache in place, is for `generate`, `compile`, "
                "`export-onnx`, `perplexity`, `inspect` and `save-checkpoint`; for a program without a cache give "
                "`quantize` an --output that ends in .pt2"
            )
        raise MXError(f"{str(path)!r} is a folder and no file: {advice}")
    if not isinstance(path, str | os.PathLike) or not Path(path).is_file():
        raise MXError(f"no file {str(path)!r}: {advice}")
    return Path(path)


def _opened(path: object, advice: str = "give a program or a package", mode: Literal["r", "a"] = "r") -> ZipFile:
    try:
        return ZipFile(_file(path, advice), mode)
    except (BadZipFile, OSError):
        raise MXError(f"{str(path)!r} is no PT2 archive: {advice}") from None
