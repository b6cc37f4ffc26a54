"""Text as tokens, in blocks: what a language model is calibrated and judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError

#: tokens of one block
BLOCK = 512


def read_text(path: str) -> str:
    """The text of a file, or of the files `*.txt` in a folder, by name.

    Raises:
        MXError: where there is none, and for a file that is no UTF-8.
    """
    place = Path(path)
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place] if place.is_file() else []
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except UnicodeDecodeError as error:
        raise MXError(f"{path!r} is no text in UTF-8: {error}") from None
    if not text.strip():
        raise MXError(f"no text in {path!r}: give a text file, or a folder of .txt files")
    return text


def sentences() -> list[str]:
    """Return the sentences of the built-in samples: questions, then as many answers, in the same order."""
    lines = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" | ") for line in lines]
    return [question for question, _ in pairs] + [answer for _, answer in pairs]


def built_in_text() -> str:
    """Return the built-in sample as one text."""
    return "\n".join(sentences())


def padded_tokens(tokenizer: Any, prompts: list[str]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of prompts, (B, S) int64, padded on the left.

    Raises:
        MXError: without a tokenizer, and for a prompt without tokens.
    """
    if tokenizer is None:
        raise MXError("the model has no tokenizer: give input_ids, or save one in its folder")
    rows = [torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.long) for prompt in prompts]
    if empty := [prompt for prompt, row in zip(prompts, rows, strict=True) if not len(row)]:
        raise MXError(f"the prompt {empty[0]!r} has no tokens: give another one")
    ones = [torch.ones_like(row) for row in rows]  # the padding's tokens do not matter
    pair = (nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side="left") for tensors in (rows, ones))
    return dict(zip(("input_ids", "attention_mask"), pair, strict=True))


def blocks(text: str, tokenizer: Any, most: int | None = None) -> list[Tensor]:
    """Tokens of a text, (1, `BLOCK`) int64 each, the last one shorter, at most `most` of them in all.

    Raises:
        MXError: without a tokenizer, and for a text of fewer than two tokens.
    """
    if tokenizer is None:
        raise MXError("the folder holds no tokenizer: text cannot be read; put tokenizer.json beside config.json")
    ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"]], dtype=torch.long)[:, :most]
    found = [block for block in ids.split(BLOCK, 1) if block.shape[1] > 1]
    if not found:
        raise MXError("the text has fewer than two tokens: give a longer one")
    return found
