"""Put image features into a decoder of transformers while it is traced.

Each token has a row of the features: row 0 is for text. So a prompt can be read in chunks, and a program for prompts
also reads single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from pt2mx.extras import import_extra
from pt2mx.pt2e.language.cache import CACHE, CacheInProgram
from pt2mx.pt2e.language.signature import example_inputs
from pt2mx.pt2e.language.vision import tower_of

#: inputs of a decoder that reads images: the features, (rows, hidden) each; the row of each token, (B, S) int64, 0 for
#: text; and where a position has several axes, (B, axes, S) int64 positions
FEATURES, ROWS, POSITIONS = "image_features", "image_rows", "image_positions"
#: rows of the features of a text, a number that no other size of an example has
_ROWS = 9


class ImageInputs(NamedTuple):
    """The image inputs of a decoder.

    Args:
        features: a meta tensor for each tensor of features, (0, hidden).
        axes: the number of axes of a position; 0: a token has only its number.
    """

    features: list[Tensor]
    axes: int

    @classmethod
    def of_program(cls, program: ExportedProgram) -> ImageInputs | None:
        """Return the image inputs of a program; None for a decoder of text."""
        named = example_inputs(program)
        if FEATURES not in named:
            return None
        features = [torch.empty(0, one.shape[1], dtype=one.dtype, device="meta") for one in named[FEATURES]]
        return cls(features, named[POSITIONS].shape[1] if POSITIONS in named else 0)

    @classmethod
    def of_model(cls, model: Any) -> ImageInputs:
        """Return the image inputs that the program of a model gets."""
        text, vision = model.config.get_text_config(), model.config.vision_config
        number = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
        feature = torch.empty(0, text.hidden_size, dtype=model.dtype, device="meta")
        return cls([feature] * number, tower_of(model.config).axes)

    def of_text(self, positions: Tensor) -> dict[str, Any]:
        """Return the inputs for tokens of text, by the number of each, (B, S)."""
        empty = [torch.zeros(_ROWS, *one.shape[1:], dtype=one.dtype, device=positions.device) for one in self.features]
        inputs: dict[str, Any] = {FEATURES: empty, ROWS: torch.zeros_like(positions)}
        if self.axes:
            inputs[POSITIONS] = positions[:, None].repeat(1, self.axes, 1)
        return inputs


@contextmanager
def merged_images(
    model: Any, cache: CacheInProgram, tokens: Tensor, images: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which a model reads tokens, (B, S), and images instead of tokens.

    Where a family adds further features to the outputs of its first layers, they do so in this context."""
    features, rows = images[FEATURES], images[ROWS]
    is_image = rows > 0
    embeds = model.get_input_embeddings()(tokens.masked_fill(is_image, 0))  # the vocabulary may lack the image token
    embeds = torch.where(is_image[..., None], features[0][rows], embeds)
    arguments: dict[str, Any] = {"input_ids": None, "inputs_embeds": embeds}
    if POSITIONS in images:
        arguments["position_ids"] = images[POSITIONS].transpose(0, 1)
    if tower_of(model.config).bidirectional:
        arguments["attention_mask"] = _masks(model.config.get_text_config(), cache, embeds, is_image)
    layers = model.get_decoder().layers
    with ExitStack() as stack:
        for layer, more in zip(layers, features[1:], strict=False):
            stack.callback(layer.register_forward_hook(partial(_add, more[rows])).remove)
        yield arguments


def _add(more: Tensor, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + more


def _masks(config: Any, cache: CacheInProgram, embeds: Tensor, is_image: Tensor) -> dict[str, Tensor]:
    """Return the masks of a decoder in which the tokens of an image see each other, by type of layer.

    All tokens of an image are read at once."""
    masking = import_extra("transformers.masking_utils", "hf")
    given = {"config": config, "inputs_embeds": embeds, "attention_mask": cache.mask, CACHE: cache}
    full, sliding = masking.create_causal_mask(**given), masking.create_sliding_window_causal_mask(**given)
    begins = is_image & ~nn.functional.pad(is_image, (1, 0))[:, :-1]
    images = begins.cumsum(1).masked_fill(~is_image, 0)  # the number of the image of each token, (B, S)
    slots = cache.length + torch.arange(embeds.shape[1], device=embeds.device)
    of_slots = torch.zeros_like(cache.mask).index_copy(1, slots, images)
    same = (images[:, None, :, None] == of_slots[:, None, None]) & is_image[:, None, :, None]
    near = torch.arange(cache.slots, device=embeds.device) > slots[:, None] - config.sliding_window
    return {
        "full_attention": full.masked_fill(same, full.dtype == torch.bool),  # an eager mask is added
        "sliding_attention": sliding.masked_fill(same & near, sliding.dtype == torch.bool),
    }
