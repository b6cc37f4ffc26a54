"""A folder to calibrate with: batches, images or recordings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.batches import load_batch

#: makes batches of files, each by what it is to be called in an error
Reader = Callable[[list[Path]], dict[str, object]]

BATCHES, IMAGES, RECORDINGS = "batches", "images", "recordings"
#: end of a file's name -> what it holds
KINDS = {
    ".pt": BATCHES,
    ".npz": BATCHES,
    ".png": IMAGES,
    ".jpg": IMAGES,
    ".jpeg": IMAGES,
    ".wav": RECORDINGS,
}
#: most names in an error
_MOST = 5


def load_batches(folder: str | os.PathLike[str], readers: Mapping[str, Reader]) -> dict[str, object]:
    """Return the batches of a folder by their files, in the order of the names.

    Args:
        folder: of batches, as `load_batch` reads them, beside which other files are left alone; of images; or of
            recordings.
        readers: for each kind of `KINDS` that the model takes besides batches, what makes batches of such files.

    Raises:
        MXError: for a folder that does not exist, holds nothing of a kind, several kinds, or a kind that the model does
            not take, and for a file that cannot be read.
    """
    files = batch_files(folder)
    kinds = sorted({_kind(file) for file in files})
    others = [file for file in sorted(Path(folder).glob("*")) if file not in files and not file.name.startswith(".")]
    if not kinds:
        held = f", this one holds {_names(others)}" if others else ""
        raise MXError(
            f"no calibration batches: {str(folder)!r} must be a folder that holds .pt or .npz files, or, for a model "
            f"with a processor, images ({_ends(IMAGES)}) or recordings ({_ends(RECORDINGS)}){held}"
        )
    if len(kinds) > 1:
        raise MXError(f"{str(folder)!r} holds {' and '.join(kinds)}: give a folder of one kind")
    (kind,) = kinds
    if kind == BATCHES:
        return {str(file): load_batch(file) for file in files}
    if others:  # a picture in a format that is not read would be missed without a word
        raise MXError(
            f"{str(folder)!r} holds {kind} ({_ends(kind)}) and other files: {_names(others)}: move them elsewhere"
        )
    if kind not in readers:
        taken = f"folder of {' or '.join(readers)}, or of " if readers else "folder of "
        raise MXError(f"{str(folder)!r} holds {kind}, which cannot be made inputs of this model: give a {taken}batches")
    return readers[kind](files)


def batch_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a folder that hold something of `KINDS`, in the order of their names; none if it is no
    folder."""
    return sorted(file for file in Path(folder).glob("*") if file.suffix.lower() in KINDS)


def groups(files: list[Path], size: int) -> Iterator[list[Path]]:
    """Yield files in groups of one size, since an export may have fixed it; the last is filled up with the first."""
    for start in range(0, len(files), size):
        yield list(islice(cycle(files), start, start + size))


def _kind(file: Path) -> str:
    return KINDS[file.suffix.lower()]


def _ends(kind: str) -> str:
    return ", ".join(end for end, of in KINDS.items() if of == kind)


def _names(files: list[Path]) -> str:
    more = f" and {len(files) - _MOST} more" if len(files) > _MOST else ""
    return ", ".join(repr(file.name) for file in files[:_MOST]) + more
