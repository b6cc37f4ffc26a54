"""Text that every machine has: the docstrings of Python's standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch


def sentences() -> list[str]:
    """The sentences of the docstrings, each once, in an order that is always the same."""
    found: dict[str, None] = {}
    for text in _docstrings():
        found.update(dict.fromkeys(s for s in re.split(r"(?<=[.!?])\s+", text) if 20 < len(s) < 200))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    listed = list(found)
    return [listed[i] for i in order]


def _docstrings() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield " ".join((ast.get_docstring(node) or "").split())
