"""Text that every machine has: the docstrings of Python's standard library, and of installed packages.

Models are calibrated on some packages, distilled on others, and evaluated on a third set.
"""

import ast
import itertools
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.accuracy.packages import folder

#: packages whose docstrings models are calibrated on, evaluated on, and distilled on
SEEN, HELD_OUT = ("sympy", "scipy"), ("networkx", "sklearn", "numpy")
LESSONS = ("torch", "transformers", "torchvision", "onnx", "sentence_transformers", "sympy", "scipy", "IPython")
#: a file -> its texts
Read = Callable[[Path], Iterable[str]]
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


def first_docstring(path: Path) -> Iterator[str]:
    """Yield the first docstring of a file of more than 200 characters."""
    return itertools.islice(long_docstrings(path), 1)


def long_docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file of more than 200 characters."""
    return (docstring for docstring in _docstrings([path]) if len(docstring) > 200)


def first_function(path: Path) -> Iterator[str]:
    """Yield the source of the first function of a file of more than 400 characters, at most 2,000 of them."""
    return itertools.islice(long_functions(path), 1)


def long_functions(path: Path) -> Iterator[str]:
    """Yield the sources of the functions of a file of more than 400 characters, at most 2,000 of each."""
    source = path.read_bytes()
    functions = (node for node in _nodes(source) if isinstance(node, ast.FunctionDef))
    sources = (ast.get_source_segment(source.decode(errors="replace"), node) or "" for node in functions)
    return (text[:2000] for text in sources if len(text) > 400)


def package_texts(names: Sequence[str], backward: bool = False, read: Read = first_docstring) -> Iterator[str]:
    """Yield the texts of the files of packages, in an order that is always the same.

    Args:
        names: the packages.
        backward: begin with the last file, so that two readers of a part share none.
        read: what to take of a file.
    """
    paths = [path for name in names for path in sorted(folder(name).rglob("*.py"))]
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    for index in order[::-1] if backward else order:
        yield from read(paths[index])


def package_text(names: Sequence[str], length: int, backward: bool = False, read: Read = first_docstring) -> str:
    """Return what `package_texts` yields as one text, cut to a number of characters."""
    text = ""
    for part in package_texts(names, backward, read):
        text += f"{part}\n\n"
        if len(text) >= length:
            break
    return text[:length]


def calibration_and_held_out(
    tokenizer: Any, length: int, seen: int, held_out: int, read: Read = first_docstring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of texts for calibration, (seen, length), validation and test, (held_out, length) int64.

    Validation and test read different files of the same packages.
    """
    parts = (SEEN, seen, False), (HELD_OUT, held_out, True), (HELD_OUT, held_out, False)
    calibration, validation, test = (
        package_blocks(tokenizer, packages, count, length, backward, read) for packages, count, backward in parts
    )
    return calibration, validation, test


def calibration_and_halves(tokenizer: Any, length: int, seen: int, held_out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens as `calibration_and_held_out`; windows 2i and 2i + 1 of validation and test are of one docstring.

    They are the first 2 * length tokens of docstrings that have as many, without those that a tokenizer adds.
    """

    def halves(backward: bool) -> Tensor:
        texts = (text[: 2 * _LETTERS * length] for text in package_texts(HELD_OUT, backward))
        ids = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: 2 * length] for text in texts)
        long = (row for row in ids if len(row) == 2 * length)
        return torch.tensor([*itertools.islice(long, held_out // 2)]).view(held_out, length)

    return package_blocks(tokenizer, SEEN, seen, length), halves(backward=True), halves(backward=False)


def package_blocks(
    tokenizer: Any, names: Sequence[str], count: int, length: int, backward: bool = False, read: Read = first_docstring
) -> Tensor:
    """Return the first tokens of the texts of packages, (count, length) int64; arguments as `package_texts` takes."""
    return token_blocks(tokenizer, package_text(names, _LETTERS * count * length, backward, read), count, length)


def token_blocks(tokenizer: Any, text: str, count: int, length: int) -> Tensor:
    """Return the first tokens of a text, (count, length) int64.

    Raises:
        ValueError: for a text that is too short.
    """
    ids = tokenizer(text[: _LETTERS * count * length], verbose=False)["input_ids"]
    if len(ids) < count * length:
        raise ValueError(
            f"the text has {len(ids)} tokens, {count} windows of {length} need more: install more packages"
        )
    return torch.tensor(ids[: count * length]).view(count, length)


def _sentences(texts: Iterable[str]) -> dict[str, None]:
    return {s: None for text in texts for s in re.split(r"(?<=[.!?])\s+", text) if 20 < len(s) < 200}


def _shuffled(texts: Iterable[str]) -> list[str]:
    listed = list(texts)
    return [listed[i] for i in torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()]


def _docstrings(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        for node in _nodes(path.read_bytes()):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield " ".join((ast.get_docstring(node) or "").split())


def _nodes(source: bytes) -> Iterator[ast.AST]:
    try:
        return ast.walk(ast.parse(source))
    except SyntaxError:  # of a newer Python
        return iter(())
