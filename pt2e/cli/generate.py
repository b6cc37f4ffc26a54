"""The command `pt2mx generate`: continue prompts with a language model, or transcribe recordings."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.audio import audio_inputs, takes_audio
from pt2mx.pt2e.cli.batches import read_image
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.prompts import image_prompt
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.cli.usage import generation_settings
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.ranks import is_first, of_first, only_first_prints
from pt2mx.pt2e.user_errors import user_errors


def run(options: argparse.Namespace) -> Result | None:
    settings = generation_settings(options)
    images = [read_image(Path(file)) for file in options.image or ()]  # a bad file should not cost loading the model
    progress = Progress(2)
    with user_errors(f"load {options.folder!r}"):
        model = LanguageModel.from_pretrained(options.folder, options.device)
    if model.tokenizer is None:
        raise MXError(f"{options.folder!r} holds no tokenizer: put tokenizer.json there")
    if options.compile:
        model.compile()
    torch.manual_seed(options.seed)
    progress.begin("generate")
    answers = []
    for question in options.audio or options.prompt or of_first(_read_prompts()):
        with user_errors("generate"), only_first_prints():
            inputs = _inputs(model, question, images, options)
            answers.append({"audio" if options.audio else "prompt": question, **_answer(model, inputs, settings)})
    # the streamer has printed the text
    return Result("", {"answers": answers}) if options.json and is_first() else None


def _read_prompts() -> Iterator[str]:
    """Yield prompts from the terminal, or the lines of stdin, until its end."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.rstrip("\n")


def _inputs(
    model: LanguageModel, question: str, images: list[Any], options: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """Return what `generate` takes for a recording or a prompt."""
    if options.audio:
        return audio_inputs(model, options.folder, question)
    if takes_audio(model):
        raise MXError(f"{options.folder!r} reads audio: give --audio FILE.wav")
    if not images:
        return _in_template(model, question) if options.chat else model.tokens([question])
    if model.processor is None:
        raise MXError("--image: the folder holds no vision-language model with its processor")
    given = image_prompt(model.processor, question, images, options.chat or None)
    return {name: tensor.to(model.device) for name, tensor in given.items()}


def _in_template(model: LanguageModel, prompt: str) -> dict[str, torch.Tensor]:
    if model.tokenizer.chat_template is None:
        raise MXError(
            "--chat: the tokenizer has no chat template; leave it out, and write the prompt as the model has it"
        )
    messages = [{"role": "user", "content": prompt}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return dict(model.tokenizer.apply_chat_template(messages, **options).to(model.device))


def _answer(model: LanguageModel, inputs: dict[str, Any], settings: dict[str, Any]) -> dict[str, object]:
    """Print the continuation of a prompt as it is generated, then its speed; return both."""
    base = import_extra("transformers", "hf").TextStreamer

    class Streamer(base):  # type: ignore[valid-type, misc]
        """Prints tokens and records their times; the first call passes the prompt."""

        def __init__(self) -> None:
            super().__init__(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []
            self.text = ""

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text
            super().on_finalized_text(text, stream_end)

    streamer, begin = Streamer(), time.perf_counter()
    model.generate(**inputs, streamer=streamer, **settings)
    _, *times = streamer.times
    first = times[0] - begin
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    note(f"first token after {first:.2f} s" + ("" if rate is None else f", then {rate:.1f} tokens/s"))
    return {"text": streamer.text, "tokens": len(times), "first_token_seconds": first, "tokens_per_second": rate}
