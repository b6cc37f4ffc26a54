"""`contents_of`: the contents of a file, or of the folder of a language model."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.archive import check_kind, record_names
from pt2mx.pt2e.contents.held import Contents
from pt2mx.pt2e.contents.package import CODE, of_package
from pt2mx.pt2e.contents.program import of_program
from pt2mx.pt2e.language.ranks import programs_in


def contents_of(path: str | os.PathLike[str]) -> list[Contents]:
    """Read what a file holds; of the folder of a language model what each of its programs and packages does.

    Args:
        path: of a program, a package or such a folder.

    Raises:
        MXError: for another file, or a folder without programs.
    """
    if not Path(path).is_dir():
        return [_of_file(path)]
    names = [*programs_in(path), *sorted(file.name for file in Path(path).glob("*.aoti.pt2"))]
    if not names:
        raise MXError(f"{str(path)!r} holds no program.pt2: give a file, or the folder of a quantized language model")
    return [_of_file(Path(path) / name) for name in names]


def _of_file(path: str | os.PathLike[str]) -> Contents:
    if any(name.startswith(CODE) for name in record_names(path)):
        return of_package(path)
    check_kind(path, "program")
    return of_program(path, torch.export.load(path))
