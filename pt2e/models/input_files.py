"""Load batches of inputs from files: tensors, images, recordings."""

from __future__ import annotations

import os
import pickle
import re
import wave
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pt2mx.errors import MXError, listed
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import one_line
from pt2mx.pt2e.models.names import BATCHES, IMAGES, KINDS, RECORDINGS, input_files

if TYPE_CHECKING:
    from PIL import Image

#: makes batches of files; their keys describe them in errors
Reader = Callable[[list[Path]], dict[str, object]]

#: Pillow's modes of values of 16 bits
_WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")
#: bytes of a sample of a recording -> its dtype, its value of silence, its largest magnitude
_PCM = {1: ("u1", 128, 2**7), 2: ("<i2", 0, 2**15), 4: ("<i4", 0, 2**31)}


def load_batch(file: Path) -> object:
    """Load the batch in a file.

    A `.pt` file holds a tensor, or a tuple or a dict of tensors (numbers, for inputs that are numbers). A `.npz` file
    holds arrays by the names of the inputs, or unnamed in order.
    """
    try:
        if file.suffix == ".pt":
            return torch.load(file, weights_only=True)
        with np.load(file) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except pickle.UnpicklingError as error:  # its message advises to load the file unsafely
        raise MXError(
            f"{file} is no batch: it holds more than tensors, numbers, lists and dicts, or is damaged"
        ) from error
    except Exception as error:
        raise MXError(f"{file} is no batch: {one_line(error)}") from error
    unnamed = all(re.fullmatch(r"arr_\d+", name) for name in tensors)  # as numpy.savez names them
    return tuple(tensors.values()) if unnamed else tensors


def load_batches(folder: str | os.PathLike[str], readers: Mapping[str, Reader]) -> dict[str, object]:
    """Load the batches of a folder, by file, in the order of the file names.

    The folder holds batches, as `load_batch` reads them, and other files, which are ignored; or images, or recordings,
    of which `readers` make batches for the model.
    """
    files = input_files(folder)
    kinds = sorted({KINDS[file.suffix.lower()] for file in files})
    others = [
        repr(file.name)
        for file in sorted(Path(folder).glob("*"))
        if file not in files and not file.name.startswith(".")
    ]
    if not kinds:
        contents = f", this one holds {listed(others)}" if others else ""
        raise MXError(
            f"no calibration batches: {str(folder)!r} must be a folder that holds .pt or .npz files, or, for a model "
            f"with a processor, a transform or --image-size, images ({_suffixes(IMAGES)}) or recordings "
            f"({_suffixes(RECORDINGS)}){contents}"
        )
    if len(kinds) > 1:
        raise MXError(f"{str(folder)!r} holds {' and '.join(kinds)}: give a folder of one kind")
    (kind,) = kinds
    if kind == BATCHES:
        return {str(file): load_batch(file) for file in files}
    if others:  # ignoring an image in an unknown format would go unnoticed
        raise MXError(
            f"{str(folder)!r} holds {kind} ({_suffixes(kind)}) and other files: {listed(others)}: move them elsewhere"
        )
    if kind not in readers:
        allowed = f"folder of {' or '.join(readers)}, or of " if readers else "folder of "
        by_options = "; --image-size, --mean and --std make inputs of images" * (kind == IMAGES)
        raise MXError(
            f"{str(folder)!r} holds {kind}, which cannot be made inputs of this model: give a {allowed}batches"
            f"{by_options}"
        )
    return readers[kind](files)


def groups(files: list[Path], size: int) -> Iterator[list[Path]]:
    """Yield files in groups of one size, which the export may have fixed; the first files fill up the last group."""
    for start in range(0, len(files), size):
        yield list(islice(cycle(files), start, start + size))


def read_image(file: Path, mode: str = "RGB") -> Image.Image:
    """Read an image of any format that Pillow reads, and turn it upright; `mode` is Pillow's name of the channels.

    torchvision's own decoders need its library, which does not load where torchvision is a CUDA build and torch a CPU
    build.
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
        reason = getattr(error, "strerror", None) or "Pillow cannot read it; give a PNG or JPEG file"
        raise MXError(f"{str(file)!r} is no image: {reason}") from None


def read_audio(file: Path, rate: int) -> np.ndarray:
    """Read the samples of a .wav file of 8, 16 or 32 bits PCM with that many samples a second: (time,) float32 in
    [-1, 1), the mean of its channels."""
    try:
        with wave.open(str(file)) as recording:
            channels, width, file_rate, count, *_ = recording.getparams()
            frames = recording.readframes(count)
    except (wave.Error, EOFError, OSError) as error:
        raise MXError(f"{str(file)!r} is no .wav file of PCM samples: {one_line(error)}") from None
    if width not in _PCM:
        raise MXError(f"{str(file)!r} has {8 * width} bits a sample: convert it to 16 (8, 16 and 32 are read)")
    if file_rate != rate:
        raise MXError(
            f"{str(file)!r} has {file_rate} samples a second, the model takes {rate}: convert it, as by "
            f"`ffmpeg -i {file.name} -ar {rate} converted.wav`"
        )
    if len(frames) != count * width * channels:
        raise MXError(f"{str(file)!r} ends after {len(frames)} of {count * width * channels} bytes: copy it again")
    dtype, silence, largest = _PCM[width]
    samples = (np.frombuffer(frames, dtype).astype(np.float32) - silence) / largest
    if not samples.size:
        raise MXError(f"{str(file)!r} holds no samples: remove it")
    return samples.reshape(-1, channels).mean(1)


def _suffixes(kind: str) -> str:
    return ", ".join(suffix for suffix, its_kind in KINDS.items() if its_kind == kind)
