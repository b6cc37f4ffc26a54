"""PT2 archives, the zip files of torch: exported programs, and packages of AOTInductor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile, ZipFile

from pt2mx.errors import MXError

#: what the files of each kind of archive begin with, below its root
_KINDS = {"data/aotinductor/": "package", "models/": "program"}
_ADVICE = {
    "program": "give what `pt2mx quantize` or torch.export.save wrote",
    "package": "give what `pt2mx compile` wrote",
}


def check_kind(path: object, kind: str) -> None:
    """`MXError` where the file is not a PT2 archive that holds a `"program"` or a `"package"`, as asked."""
    with _opened(path, _ADVICE[kind]) as archive:
        names = _records(archive)
    kinds = {found for start, found in _KINDS.items() if any(name.startswith(start) for name in names)}
    if kind not in kinds:
        found = "".join(f", but a {k}" for k in kinds)
        raise MXError(f"{str(path)!r} is no {kind}{found}: {_ADVICE[kind]}")


def read_record(path: object, name: str) -> bytes | None:
    """The content of a file in the archive, by its name below the root; None where there is none.

    Raises:
        MXError: where the file is no archive.
    """
    with _opened(path) as archive:
        found = _records(archive).get(name)
        return None if found is None else archive.read(found)


def record_names(path: object) -> list[str]:
    """The names of the files in the archive, below its root.

    Raises:
        MXError: where the file is no archive.
    """
    with _opened(path) as archive:
        return list(_records(archive))


def add_records(path: object, records: dict[str, bytes]) -> None:
    """Add files to an archive, by their names below its root."""
    with _opened(path, mode="a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        for name, content in records.items():
            archive.writestr(f"{root}/{name}", content)


def _records(archive: ZipFile) -> dict[str, str]:
    """The files in an archive: name below the root -> name."""
    return {name.partition("/")[2]: name for name in archive.namelist()}


def _file(path: object, advice: str) -> Path:
    """Return the path of a file; raise an error where there is none, which of a folder says what takes it."""
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        if any(Path(path).glob("program*.pt2")):
            advice = (
                "a language model, whose program writes its cache in place, is for `generate`, `compile`, "
                "`perplexity`, `inspect` and `save-checkpoint`; for a program without a cache give `quantize` an "
                "--output that ends in .pt2"
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
