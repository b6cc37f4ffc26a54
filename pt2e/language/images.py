"""Turn what the processor of a vision-language model gives into the image inputs of its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.language.arguments import check_step, check_tokens
from pt2mx.pt2e.language.cache import DecoderCache
from pt2mx.pt2e.language.encoder import Encoder
from pt2mx.pt2e.language.merge_images import FEATURES, POSITIONS, ROWS, ImageInputs
from pt2mx.pt2e.language.vision import check_images, tower_of


@torch.no_grad()
def read_images(
    encoder: Encoder, config: Any, tokens: Tensor, mask: Tensor | None, given: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Compute the features of images, and which of them each token of the prompts has.

    Args:
        encoder: the program of the vision tower.
        config: the configuration of the model.
        tokens: (B, S) int64, the prompts with their image tokens.
        mask: (B, S), zero at padding, or None.
        given: what the processor gives for the images.

    Returns:
        `image_features`, `image_rows` and, for positions of several axes, `image_positions`.

    Raises:
        MXError: where the prompts hold another number of image tokens than the images have features; for tokens, a
            mask or images of other shapes.
    """
    tower, device = tower_of(config), encoder.device
    tokens = check_tokens(tokens).to(device, torch.long)
    check_step(tokens, mask, None, len(tokens), 0, tokens.shape[1])
    given = {name: value.to(device) for name, value in check_images(config, given).items()}
    features = encoder(**tower.prepare(config, given))
    is_image = tokens == config.image_token_id
    check_number(is_image, len(features[0]))
    rows = is_image.flatten().cumsum(0).view_as(is_image).masked_fill(~is_image, 0)
    read = {FEATURES: [nn.functional.pad(one, (0, 0, 1, 0)) for one in features], ROWS: rows}
    if tower.axes:
        read[POSITIONS] = _positions(config, tokens, mask, given)
    return read


def check_number(is_image: Tensor, features: int) -> None:
    """Raise an `MXError` where prompts hold another number of image tokens than their images have features."""
    if (number := int(is_image.sum())) != features:
        raise MXError(
            f"the prompts hold {number} image tokens, and the images have {features} features: let the processor write "
            "the prompts, and give what it returns for the images"
        )


def _positions(config: Any, tokens: Tensor, mask: Tensor | None, given: Mapping[str, Tensor]) -> Tensor:
    """Return the positions that transformers gives to tokens, (B, axes, S)."""
    model_class = import_extra("transformers", "hf").MODEL_MAPPING[type(config)]
    model = nn.Module.__new__(model_class)  # the method reads only its configuration
    nn.Module.__init__(model)
    model.config = config
    kinds = given.get("mm_token_type_ids", (tokens == config.image_token_id).long())
    positions, _ = model.get_rope_index(tokens, kinds, given["image_grid_thw"], None, attention_mask=mask)
    return positions.transpose(0, 1)


def inputs_of_next_tokens(
    inputs: ImageInputs, read: Mapping[str, Any], positions: Tensor, mask: Tensor, cache: DecoderCache
) -> dict[str, Any]:
    """Return the image inputs for the next tokens.

    Args:
        inputs: the image inputs of the decoder.
        read: arguments with the result of `read_images` for the prompts, or without one.
        positions: (B, S) int64, the number of each next token.
        mask: (B, slots) int64, zero at padding.
        cache: the cache, which keeps by how much positions differ from numbers.
    """
    first, rows = cache.length, read.get(ROWS)
    if rows is not None and inputs.axes:
        cache.shift = read[POSITIONS].amax((1, 2)) + 1 - mask[:, : rows.shape[1]].sum(1)
    result = inputs.of_text(positions if cache.shift is None else positions + cache.shift[:, None])
    if rows is None or first >= rows.shape[1]:
        return result
    here = slice(first, first + positions.shape[1])
    number = rows[:, here].shape[1]
    result[ROWS][:, :number] = rows[:, here]
    if inputs.axes:
        result[POSITIONS][..., :number] = read[POSITIONS][..., here]
    if rows[:, here].any():
        result[FEATURES] = read[FEATURES]
    return result
