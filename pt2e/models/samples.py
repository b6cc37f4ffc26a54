"""The built-in samples of text."""

from __future__ import annotations

from pathlib import Path


def sentences() -> list[str]:
    """Return the sentences of the built-in samples: questions, then as many answers, in the same order."""
    lines = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
    questions, answers = zip(*(line.split(" | ") for line in lines), strict=True)
    return [*questions, *answers]
