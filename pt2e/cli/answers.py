"""Answer prompts with a language model: print the text as it is generated, up to a stop text, and time it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.language.texts import until_stop


@dataclass(frozen=True)
class Answer:
    """The answer of a model to a prompt; seconds and speed are those of its batch."""

    text: str
    tokens: list[int]
    first_token_seconds: float
    tokens_per_second: float | None

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain data, the tokens as their number."""
        return {**vars(self), "tokens": len(self.tokens)}


def answer(
    model: Any, tokenizer: Any, inputs: Mapping[str, Any], settings: Mapping[str, Any], prompts: Sequence[str]
) -> list[Answer]:
    """Generate the answers of a `LanguageModel`, or a model of transformers, to a batch of prompts; note their speed.

    One answer is printed as it is generated; of several each is printed below its prompt.

    Args:
        inputs: what `generate` takes for the prompts.
        settings: the options of `generate`; `stop_strings` end an answer and are not part of it.
    """
    stops = settings.get("stop_strings", ())
    base = import_extra("transformers.generation.streamers", "hf").TextStreamer

    class Streamer(base):  # type: ignore[valid-type, misc]
        """Records tokens and their times, and prints those of a single prompt; the first call passes the prompt."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []
            self.steps: list[torch.Tensor] = []
            self.whole = self.text = ""

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())
            self.steps.append(value.reshape(len(prompts), -1))
            if len(prompts) == 1:
                super().put(value)

        def end(self) -> None:
            if len(prompts) == 1:
                super().end()

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.whole += text
            shown = until_stop(self.whole, stops) if stream_end else settled(self.whole, stops)
            super().on_finalized_text(shown[len(self.text) :], stream_end)
            self.text = shown

    streamer, begin = Streamer(), time.perf_counter()
    model.generate(**inputs, streamer=streamer, tokenizer=tokenizer, **settings)
    times, rows = streamer.times[1:], torch.cat(streamer.steps[1:], 1)  # (B, T)
    tokens = [rows[0].tolist()] if len(prompts) == 1 else [until_end(row.tolist(), model) for row in rows]
    texts = [streamer.text]
    if len(prompts) > 1:
        texts = [until_stop(tokenizer.decode(row, skip_special_tokens=True), stops) for row in tokens]
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"> {prompt}\n{text}")
    first, later = times[0] - begin, sum(map(len, tokens)) - len(prompts)
    rate = later / (times[-1] - times[0]) if len(times) > 1 else None
    note(f"first token after {first:.2f} s" + ("" if rate is None else f", then {rate:.1f} tokens/s"))
    return [Answer(text, row, first, rate) for text, row in zip(texts, tokens, strict=True)]


def count_same(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Count the first tokens that two texts share."""
    count = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        count += 1
    return count


def settled(text: str, stops: Sequence[str]) -> str:
    """Return the begin of a text that stays, whatever follows: without an end that may become a stop text."""
    whole = until_stop(text, stops)
    if whole != text:
        return whole
    begun = 0
    for stop in stops:
        for n in range(1, len(stop)):
            if whole.endswith(stop[:n]):
                begun = max(begun, n)
    return whole[: len(whole) - begun]


def until_end(row: list[int], model: Any) -> list[int]:
    """Return the tokens of a row of a batch up to its end token, without the padding behind it."""
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    for i, token in enumerate(row):
        if token in ends or token == config.pad_token_id:
            return row[: i + (token in ends)]
    return row
