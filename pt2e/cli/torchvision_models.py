"""torchvision's models, with inputs as their pretrained weights take them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError, nearest
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.calibration import IMAGES, Reader, groups
from pt2mx.pt2e.cli.images import read_image

#: of the built-in inputs: their number, and their shape where the weights say none
_BATCH, _SHAPE = 2, (3, 224, 224)
#: arguments by which torchvision downloads weights
_PRETRAINED = ("weights", "weights_backbone")


def load_torchvision(name: str) -> tuple[nn.Module, list[tuple[Tensor]], dict[str, Reader]]:
    """Return a model with random weights, batches of noise, and what makes batches of images.

    Raises:
        MXError: for a model that torchvision does not have, and where it is not installed.
    """
    models = import_extra("torchvision", "vision").models
    if name not in models.list_models():
        raise MXError(f"torchvision has no model {name!r}: {nearest(name, models.list_models()).split(' allowed')[0]}")
    torch.manual_seed(0)
    taken = inspect.signature(models.get_model_builder(name)).parameters
    module = models.get_model(name, **{key: None for key in _PRETRAINED if key in taken}).eval()
    transform = _transform(models, name, module)
    shape = _SHAPE if transform is None else tuple(transform(torch.zeros(_SHAPE, dtype=torch.uint8)).shape)
    batches = [(torch.randn(_BATCH, *shape),) for _ in range(2)]
    return module, batches, {} if transform is None else {IMAGES: _reader(transform, list(shape[1:]))}


def _transform(models: Any, name: str, module: nn.Module) -> Callable[[Any], Tensor] | None:
    """Return the transform of the pretrained weights of a model of images, of those that fit it where a model has a
    size; None where there is none, as for models whose inputs are lists or videos."""
    of_images = (models, models.quantization, models.segmentation)
    if not any(name in models.list_models(module=part) for part in of_images):
        return None
    weights = models.get_model_weights(name)
    transforms = [each.transforms() for each in (weights.DEFAULT, *weights)]
    size = getattr(module, "image_size", None)
    return next((transform for transform in transforms if size is None or size in transform.crop_size), None)


def _reader(transform: Callable[[Any], Tensor], size: list[int]) -> Reader:
    crop = import_extra("torchvision.transforms.functional", "vision").center_crop

    def read(files: list[Path]) -> dict[str, object]:
        return {
            # a transform may leave an image its own proportions, of which no batch can be made
            ", ".join(map(str, group)): (torch.stack([crop(transform(read_image(file)), size) for file in group]),)
            for group in groups(files, _BATCH)
        }

    return read
