"""Batches of images, which a transform prepares for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.input_files import Reader, groups, read_image
from pt2mx.pt2e.models.names import Normalization

if TYPE_CHECKING:
    from PIL import Image

#: channels -> Pillow's name of them
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def image_reader(transform: Callable[[Image.Image], Any], size: int, mode: str = "RGB") -> Reader:
    """Return what makes batches of `size` images: a transform of each, with Pillow's channels `mode`, stacked as
    `torch.utils.data.default_collate` stacks."""

    def read(files: list[Path]) -> dict[str, object]:
        batches: dict[str, object] = {}
        for group in groups(files, size):
            source = ", ".join(map(str, group))
            images = [read_image(file, mode) for file in group]
            with user_errors(f"prepare {source}"):
                batch = default_collate([transform(image) for image in images])
            batches[source] = (batch,) if isinstance(batch, Tensor) else batch
        return batches

    return read


def normalizing_reader(
    how: Normalization, name: str, shape: Sequence[int | None], dtype: torch.dtype = torch.float32
) -> Reader:
    """Return what makes batches of images for an input.

    Args:
        how: the images are resized and cropped around the center; their values in [0, 1], less the mean, are divided by
            the standard deviation.
        name: of the input, for errors.
        shape: N, C, H and W of the input, None for a size that is not known.
        dtype: of the input.

    Raises:
        MXError: where images cannot be such an input.
    """
    if len(shape) != 4 or not dtype.is_floating_point:
        raise MXError(
            f"the input {name!r} of shape {tuple(shape)} and {dtype} takes no images, (N, C, H, W) in float: give "
            "--calibration a folder of .pt or .npz batches, and leave --image-size, --mean and --std out"
        )
    count, channels, *sizes = shape
    channels = channels or 3
    if channels not in _MODES:
        raise MXError(
            f"the input {name!r} has {channels} channels, and images have 1 (gray), 3 (RGB) or 4 (RGBA): give "
            "--calibration a folder of .pt or .npz batches"
        )
    for option, numbers in (("--mean", how.mean), ("--std", how.std)):
        if len(numbers) not in (1, channels):
            plural = "s" * (channels > 1)
            raise MXError(
                f"{option} has {len(numbers)} numbers, and the input {name!r} {channels} channel{plural}: give one "
                "number, or one of each channel"
            )
    height, width = how.size or sizes
    if not height or not width:
        raise MXError(f"the input {name!r} has no fixed height and width: give --image-size")
    fit, bilinear = import_extra("PIL.ImageOps", "vision").fit, import_extra("PIL.Image", "vision").BILINEAR
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (how.mean, how.std))

    def prepare(image: Image.Image) -> Tensor:
        values = np.array(fit(image, (width, height), bilinear), np.float32).reshape(height, width, channels)
        return ((torch.from_numpy(values).movedim(-1, 0) / 255 - mean) / std).to(dtype)  # (C, H, W)

    return image_reader(prepare, count or 1, _MODES[channels])
