"""The folder of a language model: the program with its weights, the configurations, the tokenizer, the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.program import load_program, save_program
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

#: beside the files that transformers writes
PROGRAM, REPORT = "program.pt2", "report.json"

Folder = str | os.PathLike[str]


def is_quantized(folder: Folder) -> bool:
    """True of a folder that holds a quantized language model."""
    return (Path(folder) / PROGRAM).is_file()


def save_folder(folder: Folder, program: ExportedProgram, recipe: MXQuantizer | str | None, *parts: Any) -> None:
    """Write a program and what transformers saves beside it: configurations and a tokenizer, or None.

    Raises:
        MXError: where no file can be written there.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for part in parts:
            if part is not None:
                part.save_pretrained(folder)
    except OSError as error:
        raise MXError(f"cannot write to {str(folder)!r}: {error.strerror}; give a folder") from None
    save_program(program, Path(folder) / PROGRAM, recipe)


def load_folder(folder: Folder, device: str | None = None) -> tuple[ExportedProgram, Any, Any, Any]:
    """The program, on the device if one is given, the configuration, that of `generate`, and the tokenizer or None.

    Raises:
        MXError: where the folder holds no such program.
    """
    if not is_quantized(folder):
        raise MXError(f"{str(folder)!r} holds no {PROGRAM}: give the folder that `pt2mx quantize` wrote")
    transformers = import_extra("transformers", "hf")
    program = load_program(Path(folder) / PROGRAM)
    if device is not None:
        program = move_to_device_pass(program, device)
    config = transformers.AutoConfig.from_pretrained(folder)
    settings = Path(folder) / "generation_config.json"
    generation = transformers.GenerationConfig.from_pretrained(folder) if settings.is_file() else None
    return program, config, generation, load_tokenizer(folder)


def load_tokenizer(folder: Folder) -> Any:
    """The tokenizer of a checkpoint; None where there is none, or but an empty one, as transformers makes it."""
    transformers = import_extra("transformers", "hf")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return tokenizer if len(set(tokenizer("a text of tokens")["input_ids"])) > 1 else None
    except Exception:  # tokenizers fail in as many ways as there are of them
        return None
