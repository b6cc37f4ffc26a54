"""The names of what `quantize` writes: the end of a name says what is in a file, and no other file gets it."""

from __future__ import annotations

from pathlib import Path

from pt2mx.errors import MXError
from pt2mx.pt2e.output import check_output

#: ends of the names of files -> the command that writes such a file, if there is one
_FILES = {
    ".onnx": "export-onnx",
    ".safetensors": "save-checkpoint",
    **dict.fromkeys((".bin", ".gguf", ".json", ".npz", ".pt", ".pth", ".txt", ".yaml")),
}


def check_program_name(path: str) -> None:
    """Raise an error where no program can be written at `path`, or its name is that of another kind of file."""
    try:
        check_output(path, suffixes=(".pt2",))
    except MXError as error:
        raise MXError(f"{error}{_hint(path)}") from None


def check_folder_name(path: str, checkpoint: str) -> None:
    """Raise an error where a language model cannot be written to a folder at `path`.

    Args:
        path: of the folder, which may be there.
        checkpoint: the folder that is read.
    """
    place = Path(path)
    if place.exists() and not place.is_dir():
        raise MXError(f"--output {path!r} is a file: a language model is written to a folder")
    if place.suffix.lower() in _FILES:
        raise MXError(f"--output {path!r} has the name of a file: a language model is written to a folder{_hint(path)}")
    if place.resolve() == Path(checkpoint).resolve():
        raise MXError(f"--output {path!r} is the folder of the checkpoint: give another one")


def _hint(path: str) -> str:
    suffix = Path(path).suffix.lower()
    command = _FILES.get(suffix)
    return "" if command is None else f"; `pt2mx {command}` makes a {suffix} file of what `pt2mx quantize` wrote"
