"""Processors of transformers, which make a model's inputs of images and recordings; and the shapes of these inputs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.input_files import read_audio, read_image
from pt2mx.pt2e.models.names import IMAGES, RECORDINGS
from pt2mx.pt2e.models.tokenizers import save_part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: samples and frames of a recording for a model that takes any number of them
_SAMPLES, _FRAMES = 16_000, 96


class ImageProcessor:
    """The image processor of a checkpoint; `config` is of the vision part of the model."""

    kind = IMAGES

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        self._processor = _load("AutoImageProcessor", "image processor", name)
        self._channels, *self._size = image_shape(config)

    def noise(self) -> Tensor:
        """Return a random image of the model's size, since some processors do not resize."""
        return self._image(1, 1)

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return a tall image and a wide one."""
        return self._image(2, 1), self._image(1, 2)

    def read(self, file: Path) -> Any:
        """Read an image from a file."""
        return read_image(file, "L" if self._channels == 1 else "RGB")

    def inputs(self, items: list) -> dict[str, Tensor]:
        """Return the inputs for a batch of images."""
        return dict(self._processor(images=items, return_tensors="pt"))

    def _image(self, *stretch: int) -> Tensor:
        size = [length * factor for length, factor in zip(self._size, stretch, strict=True)]
        return torch.randint(256, (self._channels, *size), dtype=torch.uint8)


class FeatureExtractor:
    """The feature extractor of a checkpoint; `config` is of the audio part of the model."""

    kind = RECORDINGS

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        self._extractor = _load("AutoFeatureExtractor", "feature extractor", name)
        padding = inspect.signature(self._extractor.__call__).parameters.get("padding")
        # some extractors pad to the one length of their model; those that do not pad cannot make a batch
        self._options = {"padding": True} if padding is not None and padding.default is False else {}

    @property
    def rate(self) -> int:
        """The samples of a recording in a second."""
        return int(self._extractor.sampling_rate)

    @property
    def longest(self) -> int | None:
        """The samples beyond which the extractor cuts a recording off; None: it takes all."""
        return getattr(self._extractor, "n_samples", None)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the extractor to a folder, from which it can be loaded."""
        save_part(self._extractor, folder)

    def noise(self) -> np.ndarray:
        """Return a second of noise."""
        return self._recording(1)

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a recording of one second, and one of two seconds."""
        return self._recording(1), self._recording(2)

    def read(self, file: Path) -> np.ndarray:
        """Read a recording from a file."""
        return read_audio(file, self.rate)

    def inputs(self, items: list) -> dict[str, Tensor]:
        """Return the inputs for a batch of recordings."""
        return dict(self._extractor(items, sampling_rate=self.rate, return_tensors="pt", **self._options))

    def _recording(self, seconds: int) -> np.ndarray:
        return (0.1 * torch.randn(seconds * self.rate)).numpy()


Processor = ImageProcessor | FeatureExtractor
#: input -> the class that makes it of files
PROCESSORS: dict[str, type[Processor]] = {
    "pixel_values": ImageProcessor,
    "input_features": FeatureExtractor,
    "input_values": FeatureExtractor,
}


def _load(auto: str, description: str, name: str) -> Any:
    transformers = import_extra("transformers", "hf")
    try:
        return getattr(transformers, auto).from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # any library that reads it may raise anything
        raise MXError(f"{name!r} holds no {description} that can be loaded: {str(error).partition('. ')[0]}") from None


def shape_from_config(key: str, config: PretrainedConfig) -> tuple[int, ...] | None:
    """Return the shape of an input of images or recordings without the batch; None where the config does not say it."""
    for fields, shape in _SHAPES.get(key, {}).items():
        if all(getattr(config, field, None) is not None for field in fields):
            return shape(config)
    return None


def media_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the part of a model that takes images or recordings."""
    parts = ("vision_config", "audio_config", "encoder")
    return next((part for key in parts if (part := getattr(config, key, None)) is not None), config)


def image_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return channels, height and width of a model's images."""
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, tuple | list) else (size, size)
    return getattr(config, "num_channels", 3), height, width


#: input -> fields of a config -> the shape, where a config has all of the fields
_SHAPES: dict[str, dict[tuple[str, ...], Callable[[PretrainedConfig], tuple[int, ...]]]] = {
    "pixel_values": {(): image_shape},
    "input_features": {
        # Whisper: a fixed length, which two convolutions halve
        ("num_mel_bins", "max_source_positions"): lambda config: (config.num_mel_bins, 2 * config.max_source_positions),
        ("input_feat_per_channel",): lambda config: (_FRAMES, config.input_feat_per_channel),  # Speech2Text
        ("feature_projection_input_dim",): lambda config: (_FRAMES, config.feature_projection_input_dim),  # W2v-BERT
    },
    "input_values": {
        ("max_length", "num_mel_bins"): lambda config: (config.max_length, config.num_mel_bins),  # AST
        ("conv_stride", "conv_kernel"): lambda config: (_SAMPLES,),  # wav2vec 2.0
    },
}
