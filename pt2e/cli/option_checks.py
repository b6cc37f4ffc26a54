"""Checks of a command's options, made before any work."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.batches import batch_files
from pt2mx.pt2e.cli.doctor_checks import COMPILER
from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.cli.usage import source_file
from pt2mx.pt2e.files.archive import check_kind
from pt2mx.pt2e.files.output import check_distinct, check_output
from pt2mx.pt2e.files.user_errors import one_line
from pt2mx.pt2e.program.provenance import other_version

#: suffix of a file -> the command that writes such a file, or None
_FILES = {
    ".onnx": "export-onnx",
    ".pte": "export-executorch",
    ".safetensors": "save-checkpoint",
    **dict.fromkeys((".bin", ".gguf", ".json", ".npz", ".pt", ".pth", ".txt", ".yaml")),
}


def check_device(device: str) -> None:
    """Raise an `MXError` for a device that this machine lacks."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MXError("--device cuda needs an NVIDIA GPU and a torch that is built for it: leave it out for the CPU")


def check_compiler() -> None:
    """Raise an `MXError` without a C++ compiler: Inductor needs one, on a GPU too."""
    cpp_builder = importlib.import_module("torch._inductor.cpp_builder")  # takes seconds
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        raise MXError(
            f"there is no C++ compiler ({one_line(error)}): {COMPILER}; `pt2mx doctor` looks for it"
        ) from error


def check_program_file(options: argparse.Namespace) -> None:
    """Raise an `MXError` where `options.program` holds no exported program, or is also the output; say which other
    version of pt2mx wrote it."""
    check_distinct({"--output": options.output}, {"the program": options.program})
    check_kind(options.program, "program")
    if text := other_version(options.program):
        note(text)


def check_eval_options(options: argparse.Namespace) -> None:
    """Raise an `MXError` for invalid options of `compare` and `sensitivity`."""
    check_device(options.device)
    if options.model.startswith("onnx:"):
        raise MXError("an ONNX file is not taken here: `pt2mx quantize --model onnx:FILE` compares its outputs")
    if options.calibration == "none":
        raise MXError("--calibration none leaves no batch to evaluate on: give a folder, or leave it out")


def check_eval_output(options: argparse.Namespace, recipes: Iterable[str] = (), suffixes: tuple[str, ...] = ()) -> None:
    """Raise an `MXError` where `options.output` cannot be written, or is also an input: the model, the calibration or
    one of `recipes`."""
    check_output(options.output, suffixes)
    recipe_files = {f"the recipe {name!r}": name for name in recipes if os.path.isfile(name)}
    check_distinct({"--output": options.output}, {**input_files(options), **recipe_files})


def input_files(options: argparse.Namespace) -> dict[str, object]:
    """Return the user's files that `options.model` and `options.calibration` name, by their description in errors."""
    files: dict[str, object] = {"the model": source_file(options.model)}
    if options.model.startswith("hf:"):
        folder = Path(options.model.removeprefix("hf:"))
        files |= {f"the checkpoint's file {file.name!r}": file for file in folder.glob("*")}
    if options.calibration not in (None, "none"):
        files |= {f"the calibration batch {file.name!r}": file for file in batch_files(options.calibration)}
    return files


def split_names(text: str) -> list[str]:
    """Return the names in an option, separated by commas and blanks."""
    return [name.strip() for name in text.split(",")]


def check_program_name(path: str) -> None:
    """Raise an `MXError` where no program can be written at `path`, or its suffix belongs to another kind of file."""
    try:
        check_output(path, suffixes=(".pt2",))
    except MXError as error:
        raise MXError(f"{error}{_hint(path)}") from None


def check_folder_name(path: str, checkpoint: str) -> None:
    """Raise an `MXError` where a language model cannot be written to a folder at `path`.

    Args:
        path: the folder to write, which may exist.
        checkpoint: the folder that the command reads.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise MXError(f"--output {path!r} is a file: a language model is written to a folder")
    if folder.suffix.lower() in _FILES:
        raise MXError(f"--output {path!r} has the name of a file: a language model is written to a folder{_hint(path)}")
    if folder.resolve() == Path(checkpoint).resolve():
        raise MXError(f"--output {path!r} is the folder of the checkpoint: give another one")


def _hint(path: str) -> str:
    suffix = Path(path).suffix.lower()
    command = _FILES.get(suffix)
    return "" if command is None else f"; `pt2mx {command}` makes a {suffix} file of what `pt2mx quantize` wrote"
