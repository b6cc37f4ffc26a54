"""Text that every machine has: the docstrings of Python's standard library, and of installed packages.

Models are calibrated on some packages, distilled on others, and evaluated on a third set.
"""

from __future__ import annotations

import ast
import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.accuracy.packages import folder

#: packages whose docstrings models are calibrated on, evaluated on, and distilled on
SEEN, HELD_OUT = ("sympy", "scipy"), ("networkx", "sklearn", "numpy")
LESSONS = ("torch", "transformers", "torchvision", "onnx", "sentence_transformers", "sympy", "scipy", "IPython")
#: characters of a text that are certainly enough for one token
_LETTERS = 8


def sentences() -> list[str]:
    """Return the sentences of the docstrings, each once, in an order that is always the same."""
    return _shuffled(_sentences(_docstrings(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))))


def more_sentences(count: int) -> list[str]:
    """Return sentences of the docstrings of packages for distillation, none of `sentences`."""
    known = set(sentences())
    return [s for s in _shuffled(_sentences(package_docstrings(LESSONS))) if s not in known][:count]


def package_docstrings(names: Sequence[str]) -> list[str]:
    """Return the docstrings of packages of more than 200 characters, each once, in an order that is always the same."""
    paths = [path for name in names for path in sorted(folder(name).rglob("*.py"))]
    return _shuffled(dict.fromkeys(docstring for docstring in _docstrings(paths) if len(docstring) > 200))


def package_text(names: Sequence[str], length: int, backward: bool = False) -> str:
    """The first long docstring of files of packages, in an order that is always the same, cut to a number of
    characters; `backward` begins with the last file, so that two texts share none."""
    paths = [path for name in names for path in sorted(folder(name).rglob("*.py"))]
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    text = ""
    for index in order[::-1] if backward else order:
        long = (docstring for docstring in _docstrings(paths[index : index + 1]) if len(docstring) > 200)
        text += "".join(f"{docstring}\n\n" for docstring in itertools.islice(long, 1))
        if len(text) >= length:
            break
    return text[:length]


def calibration_and_held_out(tokenizer: Any, length: int, seen: int, held_out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of docstrings for calibration, (seen, length), validation and test, (held_out, length) int64.

    Validation and test read different files of the same packages.
    """

    def tokens(packages: tuple[str, ...], count: int, backward: bool = False) -> Tensor:
        return token_blocks(tokenizer, package_text(packages, _LETTERS * count * length, backward), count, length)

    return tokens(SEEN, seen), tokens(HELD_OUT, held_out, backward=True), tokens(HELD_OUT, held_out)


def token_blocks(tokenizer: Any, text: str, count: int, length: int) -> Tensor:
    """Return the first tokens of a text, (count, length) int64."""
    ids = tokenizer(text[: _LETTERS * count * length], verbose=False)["input_ids"]
    return torch.tensor(ids[: count * length]).view(count, length)


def _sentences(texts: Iterable[str]) -> dict[str, None]:
    return {s: None for text in texts for s in re.split(r"(?<=[.!?])\s+", text) if 20 < len(s) < 200}


def _shuffled(texts: Iterable[str]) -> list[str]:
    listed = list(texts)
    return [listed[i] for i in torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()]


def _docstrings(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        try:
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
        except SyntaxError:  # of a newer Python
            continue
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield " ".join((ast.get_docstring(node) or "").split())
