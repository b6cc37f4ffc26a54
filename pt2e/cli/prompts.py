"""Prompts with images for a vision-language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.batches import IMAGES, KINDS, read_image
from pt2mx.pt2e.user_errors import user_errors


def images_in(folder: str) -> list[Any]:
    """Return the images of a folder, in the order of their names.

    Raises:
        MXError: for a file that looks like an image and is none.
    """
    files = sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []
    return [read_image(file) for file in files if KINDS.get(file.suffix.lower()) == IMAGES]


def image_prompt(processor: Any, prompt: str, images: list[Any], in_template: bool | None = None) -> dict[str, Tensor]:
    """Return what a processor gives for a prompt with images, which come before its text unless it says where.

    Args:
        processor: the processor.
        prompt: the prompt; it may hold the token of images.
        images: the images.
        in_template: put it into the chat template of the processor; None: where it has one.

    Raises:
        MXError: for a chat template that is missing, and for images that are not those of the prompt.
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
