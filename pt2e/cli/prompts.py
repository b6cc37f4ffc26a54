"""Prompts of a language model: from files, in the turns of a chat, and with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language.texts import padded
from pt2mx.pt2e.models.input_files import read_image
from pt2mx.pt2e.models.names import IMAGES, KINDS, input_files


def read_prompt(file: str) -> str:
    """Return the text of a file as one prompt, without the line break at its end."""
    try:
        prompt = Path(file).read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise MXError(f"--prompt-file: no file {file!r} that can be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MXError(f"--prompt-file: {file!r} is no text in UTF-8") from None
    if not prompt:
        raise MXError(f"--prompt-file: {file!r} holds no prompt")
    return prompt


def chat_tokens(tokenizer: Any, conversations: list[list[dict[str, str]]]) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of conversations in the chat template, (B, S) int64, padded on the left.

    A conversation is a list of turns, `{"role": "user", "content": "Hello"}`; the model answers the last one.
    """
    if tokenizer.chat_template is None:
        raise MXError(
            "--chat: the tokenizer has no chat template; leave it out, and write the prompt as the model has it"
        )
    options = {"add_generation_prompt": True, "return_dict": True}
    return padded([tokenizer.apply_chat_template(turns, **options)["input_ids"] for turns in conversations])


def images_in(folder: str) -> list[Any]:
    """Return the images of a folder, in the order of their names."""
    return [read_image(file) for file in input_files(folder) if KINDS[file.suffix.lower()] == IMAGES]


def image_prompt(processor: Any, prompt: str, images: list[Any], in_template: bool | None = None) -> dict[str, Tensor]:
    """Return what a processor gives for a prompt with images, which come before its text unless that says where.

    It is put into the chat template of the processor; `in_template=None`: where there is one.
    """
    template = processor.chat_template
    if in_template and template is None:
        raise MXError("--chat: the processor has no chat template; leave it out, and write the whole prompt")
    token = getattr(processor, "boi_token", None) or processor.image_token
    options = {"return_tensors": "pt", "return_dict": True}
    with user_errors("process the images"):
        if token in prompt or template is None or in_template is False:
            text = prompt if token in prompt else token * len(images) + prompt
            return dict(processor(text=[text], images=images, return_tensors="pt"))
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": prompt}]
        messages = [{"role": "user", "content": parts}]
        return dict(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, **options))
