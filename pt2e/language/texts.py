"""Text as blocks of tokens, for calibration and evaluation; and the perplexity of a model on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2mx.analysis.metrics import kl_divergence
from pt2mx.errors import MXError
from pt2mx.pt2e.models.samples import sentences

#: tokens of one block
BLOCK = 512


def read_text(path: str) -> str:
    """Read a text file, or the files `*.txt` of a folder in the order of their names.

    Raises:
        MXError: where there is no text, and for a file that is not UTF-8.
    """
    source = Path(path)
    files = sorted(source.glob("*.txt")) if source.is_dir() else [source]
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    except UnicodeDecodeError as error:
        raise MXError(f"{path!r} is no text in UTF-8: {error}") from None
    if not text.strip():
        raise MXError(f"no text in {path!r}: give a text file, or a folder of .txt files")
    return text


def built_in_text() -> str:
    """Return the built-in sample as one text."""
    return "\n".join(sentences())


def padded(rows: Sequence[Sequence[int]], side: str = "left") -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of tokens, (B, S) int64, padded on the left or the right side."""
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    ones = [torch.ones_like(row) for row in tokens]  # the mask hides the tokens of the padding
    pair = (nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side) for tensors in (tokens, ones))
    return dict(zip(("input_ids", "attention_mask"), pair, strict=True))


def padded_tokens(tokenizer: Any, prompts: list[str], side: str = "left") -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of prompts, (B, S) int64, padded on the left or the right side.

    Raises:
        MXError: without a tokenizer, and for a prompt without tokens.
    """
    if tokenizer is None:
        raise MXError("the model has no tokenizer: give input_ids, or save one in its folder")
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    if empty := [prompt for prompt, row in zip(prompts, rows, strict=True) if not len(row)]:
        raise MXError(f"the prompt {empty[0]!r} has no tokens: give another one")
    return padded(rows, side)


def blocks(text: str, tokenizer: Any, most: int | None = None) -> list[Tensor]:
    """Return the tokens of a text in blocks, (1, `BLOCK`) int64 each, at most `most` tokens in all.

    The last block may be shorter.

    Raises:
        MXError: without a tokenizer, and for a text of fewer than two tokens.
    """
    if tokenizer is None:
        raise MXError("the folder holds no tokenizer: text cannot be read; put tokenizer.json next to config.json")
    ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"]], dtype=torch.long)[:, :most]
    text_blocks = [block for block in ids.split(BLOCK, 1) if block.shape[1] > 1]
    if not text_blocks:
        raise MXError("the text has fewer than two tokens: give a longer one")
    return text_blocks


#: tokens, (1, S) int64 -> logits (1, S, vocabulary)
Predict = Callable[[Tensor], Tensor]


def until_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first stop text in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


@dataclass(frozen=True)
class Perplexity:
    """The quality of a model's predictions of a text, also compared with the float model.

    Args:
        tokens: the number of predicted tokens.
        perplexity: exp of the mean negative log-likelihood of a token; Inf where the mean exceeds 709 nats, and where a
            token of the text has a logit of -inf.
        divergence: the mean Kullback-Leibler divergence from the float model's prediction, nats; None without one.
        agreement: the share of tokens for which both predict the same most likely token; None without a float model.
    """

    tokens: int
    perplexity: float
    divergence: float | None = None
    agreement: float | None = None


@torch.no_grad()
def perplexity(predict: Predict, blocks: Iterable[Tensor], reference: Predict | None = None) -> Perplexity:
    """Predict each token of a block, (1, S) int64, except the first, from the tokens before it in the block.

    Args:
        predict: the model.
        blocks: the text.
        reference: the float model to compare the predictions with; None: no comparison.

    Raises:
        MXError: where no block has a second token.
    """
    tokens, loss, divergence, same = 0, 0.0, 0.0, 0
    for block in blocks:
        log = predict(block)[0, :-1].float().log_softmax(-1)  # (S - 1, vocabulary)
        target = block[0, 1:].to(log.device)
        tokens += len(target)
        loss += float(F.nll_loss(log, target, reduction="sum"))
        if reference is not None:
            exact = reference(block)[0, :-1].float().log_softmax(-1).to(log.device)
            divergence += float(kl_divergence(exact, log).sum())
            same += int((log.argmax(-1) == exact.argmax(-1)).sum())
    if not tokens:
        raise MXError("there is no token to predict: give blocks of at least two tokens")
    mean = torch.tensor(loss / tokens, dtype=torch.float64)
    compared = () if reference is None else (divergence / tokens, same / tokens)
    return Perplexity(tokens, float(mean.exp()), *compared)
