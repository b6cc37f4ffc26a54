"""The command `pt2mx generate`: continue prompts with a language model, chat with it, or transcribe recordings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.answers import Answer, answer, count_same
from pt2mx.pt2e.cli.audio import audio_inputs, takes_audio
from pt2mx.pt2e.cli.checks import generation_settings
from pt2mx.pt2e.cli.programs import load_folder
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.prompts import chat_tokens, image_prompt, read_prompt
from pt2mx.pt2e.cli.result import Result, is_json
from pt2mx.pt2e.files.output import write_text
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language.cache import CACHE, DecoderCache
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.positions import Room
from pt2mx.pt2e.language.ranks import is_first, of_first, only_first_prints
from pt2mx.pt2e.models.input_files import read_image
from pt2mx.pt2e.models.pretrained import load_language_model

#: characters of a prompt in a message
_SHOWN = 40
#: a turn of a conversation, as chat templates take it
Turn = dict[str, str]


def run(options: argparse.Namespace) -> Result | None:
    settings = generation_settings(options)
    images = [read_image(Path(file)) for file in options.image or ()]  # a bad file should not cost loading the model
    prompts = [*(options.prompt or ()), *map(read_prompt, options.prompt_file or ())]
    progress = Progress(2 + (options.float is not None))
    model = load_folder(options.folder, options.device)
    if model.tokenizer is None:
        raise MXError(f"{options.folder!r} holds no tokenizer: put tokenizer.json there")
    if options.compile:
        model.compile()
    models = {"quantized": model}
    if options.float is not None:
        progress.begin("load the float model")
        models = {"float": load_language_model(options.float, dtype=options.dtype).to(model.device), **models}
    torch.manual_seed(options.seed)
    progress.begin("generate")
    conversation = Conversation(model, options.system)
    is_conversation = options.chat and not prompts and not images
    rows: list[dict[str, object]] = []
    error = None
    for batch in _batches(options.audio or prompts, together=not options.audio and not images):
        try:
            with user_errors("generate"), only_first_prints():
                inputs = _inputs(model, batch, conversation, images, options)
                room = None if options.audio else model.room(inputs["input_ids"], inputs.get("attention_mask"))
                if is_conversation and rows and room is not None and room.new_tokens < 1:
                    note(f"the conversation ends: it is longer than the {room.positions} positions of the model")
                    break
                bounded = _within(room, settings, None if is_conversation else options.max_new_tokens, batch)
                cache = conversation.cache_for(inputs["input_ids"]) if is_conversation else {}
                answers = _answers(models, inputs, bounded, batch, cache)
        except MXError as reason:  # the answers so far are kept
            if not rows:
                raise
            error = reason
            break
        rows += _rows("audio" if options.audio else "prompt", batch, answers)
        if is_conversation:
            conversation.add(batch[0], answers["quantized"][0])
    if not is_first():
        return None
    result = Result("", {"answers": rows}, error=error)  # the texts are printed already
    if options.output is not None:
        texts = "".join(f"{row['text']}\n" for row in rows)
        write_text(result.to_json() if is_json(options.output) else texts, options.output)
    return result


def _within(room: Room | None, settings: dict[str, Any], asked: int | None, batch: list[str]) -> dict[str, Any]:
    """Return settings for as many tokens as the prompts of a batch leave room for; refuse more if asked for them."""
    if room is None:
        return settings
    try:
        room.check(asked or 0, "--max-new-tokens ")
    except MXError as error:
        raise MXError(f"{_shown(batch[room.row])}: {error}") from None
    if settings["max_new_tokens"] <= room.new_tokens:
        return settings
    tokens = f"{room.new_tokens} token{'s' * (room.new_tokens != 1)}"
    note(f"the answer ends after {tokens} at the latest: the model has {room.positions} positions")
    return {**settings, "max_new_tokens": room.new_tokens}


def _shown(prompt: str) -> str:
    """Return the begin of a prompt, quoted."""
    return repr(prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]} ...")


def _batches(prompts: list[str], together: bool) -> Iterable[list[str]]:
    """Return the prompts to answer at a time: those of the command line together, otherwise one after the other."""
    if together and prompts:
        return [prompts]
    return ([prompt] for prompt in prompts or of_first(_read_prompts()))


def _read_prompts() -> Iterator[str]:
    """Yield prompts from the terminal, or the lines of stdin, until its end."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _inputs(
    model: LanguageModel, batch: list[str], conversation: Conversation, images: list[Any], options: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """Return what `generate` takes for a recording, or for prompts after the turns of a conversation."""
    if options.audio:
        return audio_inputs(model, options.folder, batch[0])
    if takes_audio(model):
        raise MXError(f"{options.folder!r} reads audio: give --audio FILE.wav")
    if images:
        if model.processor is None:
            raise MXError("--image: the folder holds no vision-language model with its processor")
        inputs = image_prompt(model.processor, batch[0], images, options.chat or None)
    elif options.chat:
        turns = [[*conversation.turns, {"role": "user", "content": prompt}] for prompt in batch]
        inputs = chat_tokens(model.tokenizer, turns)
    else:
        return model.tokens(batch)
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def _answers(
    models: dict[str, Any], inputs: dict[str, Any], settings: dict[str, Any], batch: list[str], cache: dict[str, Any]
) -> dict[str, list[Answer]]:
    """Return the answers of each model. All draw the same random numbers; the quantized model's draws are kept, and it
    alone gets the cache."""
    model, answers = models["quantized"], {}
    cards = [model.device] if model.device.type == "cuda" else []
    for name, one in models.items():
        if len(models) > 1:
            print(f"{name}:")
        with nullcontext() if one is model else torch.random.fork_rng(cards):
            answers[name] = answer(one, model.tokenizer, inputs | (cache if one is model else {}), settings, batch)
    return answers


def _rows(kind: str, batch: list[str], answers: dict[str, list[Answer]]) -> list[dict[str, object]]:
    """Return the answers as plain data, and note how many tokens are those of the float model."""
    rows = [{kind: name, **one.to_dict()} for name, one in zip(batch, answers["quantized"], strict=True)]
    for row, one, reference in zip(rows, answers["quantized"], answers.get("float", ()), strict=False):
        same = count_same(one.tokens, reference.tokens)
        note(f"the first {same} of {len(one.tokens)} tokens are those of the float model")
        row |= {"float": reference.text, "same_tokens": same}
    return rows


class Conversation:
    """The turns of a conversation. The model reads each turn once: its cache keeps the tokens of the earlier ones.

    Args:
        model: the model that answers.
        system: the system message before the first turn, if any.
    """

    def __init__(self, model: LanguageModel, system: str | None) -> None:
        self.turns: list[Turn] = [{"role": "system", "content": system}] if system else []
        self._model, self._tokens = model, list[int]()
        self._cache: DecoderCache | None = None

    def cache_for(self, input_ids: Tensor) -> dict[str, Any]:
        """Return the cache for a prompt, (1, S) int64, as an argument of `generate`.

        The cache keeps the tokens that the prompt begins with. The model reads an answer again if the chat template
        writes it in other tokens. A model with an encoder, or with recurrent layers, which cannot drop tokens, reads
        the whole prompt.
        """
        if self._model.config.is_encoder_decoder:
            return {}
        if self._cache is None:
            self._cache = self._model.new_cache(1, input_ids.shape[1])
        prompt, cache = input_ids[0].tolist(), self._cache
        same = count_same(self._tokens[: cache.length], prompt[:-1])  # the model reads at least one token
        if same == 0 or not all(layer.is_croppable for layer in cache.layers):
            cache.reset()
        for layer in cache.layers if same < cache.length else ():
            layer.crop(same)
        self._tokens = prompt
        return {CACHE: cache}

    def add(self, prompt: str, answer: Answer) -> None:
        """Add a prompt and its answer as turns."""
        self.turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.text}]
        self._tokens += answer.tokens
