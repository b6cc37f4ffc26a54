"""Files of images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.user_errors import one_line

if TYPE_CHECKING:
    from PIL import Image

#: Pillow's modes of values of 16 bits
_WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")


def read_image(file: Path, mode: str = "RGB") -> Image.Image:
    """Return the image in a file, upright.

    Args:
        file: of any format that Pillow reads. torchvision's own decoders need its library, which a CUDA build beside a
            CPU torch lacks.
        mode: Pillow's name of the channels.

    Raises:
        MXError: for a file that holds none, and where Pillow is not installed.
    """
    pillow, operations = import_extra("PIL.Image", "vision"), import_extra("PIL.ImageOps", "vision")
    try:
        with pillow.open(file) as image:
            upright = operations.exif_transpose(image)
            if upright.mode in _WIDE:  # which `convert` would clip to 255
                scaled = (np.asarray(upright, dtype=np.float64) / 257).round().clip(0, 255)
                upright = pillow.fromarray(scaled.astype(np.uint8))
            return upright.convert(mode)
    except Exception as error:  # a decoder fails in many ways on a broken file
        raise MXError(f"{str(file)!r} is no image: {one_line(error)}") from None
