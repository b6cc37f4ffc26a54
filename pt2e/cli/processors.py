"""The processors of checkpoints, which make a model's inputs of images and of recordings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.calibration import IMAGES, RECORDINGS
from pt2mx.pt2e.cli.config_shapes import image_shape
from pt2mx.pt2e.cli.images import read_image
from pt2mx.pt2e.cli.recordings import read_recording

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Processor(Protocol):
    """Makes a model's inputs of files of a kind."""

    #: of `pt2mx.pt2e.cli.calibration.KINDS`
    kind: str

    def __init__(self, name: str, config: PretrainedConfig) -> None: ...

    def noise(self) -> Any:
        """Return something random of the kind."""

    def extremes(self) -> tuple[Any, Any]:
        """Return two of the kind, whose inputs differ in each dimension that may vary."""

    def read(self, file: Path) -> Any:
        """Return what a file holds."""

    def inputs(self, items: list) -> dict[str, Tensor]:
        """Return the inputs that a batch of what `noise` and `read` return is made to."""


class ImageProcessor:
    """An image processor of transformers.

    Args:
        name: of the checkpoint, as `load_checkpoint` takes it.
        config: of the part of the model that sees.

    Raises:
        MXError: for a checkpoint without one.
    """

    kind = IMAGES

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        self._processor = _load("AutoImageProcessor", "image processor", name)
        self._channels, *self._size = image_shape(config)

    def noise(self) -> Tensor:
        """Return a random image of the model's size, which a processor that does not resize leaves."""
        return self._image(1, 1)

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return a tall image and a wide one."""
        return self._image(2, 1), self._image(1, 2)

    def read(self, file: Path) -> Any:
        """Return the image in a file."""
        return read_image(file, "L" if self._channels == 1 else "RGB")

    def inputs(self, items: list) -> dict[str, Tensor]:
        """Return the inputs made of images."""
        return dict(self._processor(images=items, return_tensors="pt"))

    def _image(self, *stretch: int) -> Tensor:
        size = [extent * factor for extent, factor in zip(self._size, stretch, strict=True)]
        return torch.randint(256, (self._channels, *size), dtype=torch.uint8)


class FeatureExtractor:
    """A feature extractor of transformers; arguments and errors as of `ImageProcessor`."""

    kind = RECORDINGS

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        self._extractor = _load("AutoFeatureExtractor", "feature extractor", name)
        padding = inspect.signature(self._extractor.__call__).parameters.get("padding")
        # some pad to the one length that their model takes; those that do not pad cannot make a batch
        self._options = {"padding": True} if padding is not None and padding.default is False else {}

    def noise(self) -> np.ndarray:
        """Return a second of noise."""
        return self._recording(1)

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a recording of one second, and of two."""
        return self._recording(1), self._recording(2)

    def read(self, file: Path) -> np.ndarray:
        """Return the recording in a file."""
        return read_recording(file, self._extractor.sampling_rate)

    def inputs(self, items: list) -> dict[str, Tensor]:
        """Return the inputs made of recordings."""
        rate = self._extractor.sampling_rate
        return dict(self._extractor(items, sampling_rate=rate, return_tensors="pt", **self._options))

    def _recording(self, seconds: int) -> np.ndarray:
        return (0.1 * torch.randn(seconds * self._extractor.sampling_rate)).numpy()


#: input -> what makes it of files
PROCESSORS: dict[str, type[Processor]] = {
    "pixel_values": ImageProcessor,
    "input_features": FeatureExtractor,
    "input_values": FeatureExtractor,
}


def _load(auto: str, called: str, name: str) -> Any:
    transformers = import_extra("transformers", "hf")
    try:
        return getattr(transformers, auto).from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of any of the libraries that read it
        raise MXError(f"{name!r} holds no {called} that can be loaded: {str(error).partition('. ')[0]}") from None
