"""Text that every machine has: the docstrings of Python's standard library, and of installed packages."""

from __future__ import annotations

import ast
import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from tests.benchmarks.accuracy.packages import folder


def sentences() -> list[str]:
    """The sentences of the docstrings, each once, in an order that is always the same."""
    found: dict[str, None] = {}
    for text in _docstrings(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        found.update(dict.fromkeys(s for s in re.split(r"(?<=[.!?])\s+", text) if 20 < len(s) < 200))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    listed = list(found)
    return [listed[i] for i in order]


def package_text(names: Sequence[str], length: int) -> str:
    """The first long docstring of files of packages, in an order that is always the same, cut to a number of
    characters."""
    paths = [path for name in names for path in sorted(folder(name).rglob("*.py"))]
    text = ""
    for index in torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist():
        long = (docstring for docstring in _docstrings(paths[index : index + 1]) if len(docstring) > 200)
        text += "".join(f"{docstring}\n\n" for docstring in itertools.islice(long, 1))
        if len(text) >= length:
            break
    return text[:length]


def _docstrings(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield " ".join((ast.get_docstring(node) or "").split())
