"""Files of images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.error_text import one_line

if TYPE_CHECKING:
    from PIL import Image


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
            return operations.exif_transpose(image).convert(mode)
    except Exception as error:  # a decoder fails in many ways on a broken file
        raise MXError(f"{str(file)!r} is no image: {one_line(error)}") from None
