"""The shapes of inputs that the config of a checkpoint says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: samples of a recording, and frames, where a model takes any number
_SAMPLES, _FRAMES = 16_000, 96


def input_shape(key: str, config: PretrainedConfig) -> tuple[int, ...] | None:
    """Return the shape of an input of images or recordings, the batch apart; None where the config says none."""
    for fields, shape in _SHAPES.get(key, {}).items():
        if all(getattr(config, field, None) is not None for field in fields):
            return shape(config)
    return None


def part_of_media(config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a config that images and recordings go by: of several models in one, that which takes them."""
    parts = ("vision_config", "audio_config", "encoder")
    return next((part for key in parts if (part := getattr(config, key, None)) is not None), config)


def image_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return channels, height and width of the images of a model."""
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, tuple | list) else (size, size)
    return getattr(config, "num_channels", 3), height, width


#: input -> fields of a config -> the shape, where a config has them all
_SHAPES: dict[str, dict[tuple[str, ...], Callable[[PretrainedConfig], tuple[int, ...]]]] = {
    "pixel_values": {(): image_shape},
    "input_features": {
        # of one length, which two convolutions halve (Whisper)
        ("num_mel_bins", "max_source_positions"): lambda config: (config.num_mel_bins, 2 * config.max_source_positions),
        ("input_feat_per_channel",): lambda config: (_FRAMES, config.input_feat_per_channel),  # Speech2Text
        ("feature_projection_input_dim",): lambda config: (_FRAMES, config.feature_projection_input_dim),  # W2v-BERT
    },
    "input_values": {
        ("max_length", "num_mel_bins"): lambda config: (config.max_length, config.num_mel_bins),  # AST
        ("conv_stride", "conv_kernel"): lambda config: (_SAMPLES,),  # wav2vec 2.0
    },
}
