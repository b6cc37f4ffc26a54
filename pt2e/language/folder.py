"""Read and write the folder of a language model: program, configurations, tokenizer and report."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.card import write_card
from pt2mx.pt2e.files.card_metadata import README, RECIPE, REPORT, TERMS, may_write_card
from pt2mx.pt2e.files.output import whole_file, write_text
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language import ranks
from pt2mx.pt2e.language.tensor_parallel import is_shard
from pt2mx.pt2e.models.hub import origin_of
from pt2mx.pt2e.models.tokenizers import (
    GENERATION,
    PROCESSOR,
    TOKENIZER,
    Folder,
    load_generation_config,
    load_processor,
    load_tokenizer,
    save_part,
)
from pt2mx.pt2e.program.program import load_program, save_program
from pt2mx.pt2e.program.provenance import Provenance
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

#: files that the folder of a model may lack
_OPTIONAL = (RECIPE, REPORT, ranks.ENCODER, GENERATION, *TOKENIZER, *PROCESSOR)


def is_quantized(folder: Folder) -> bool:
    """Return True for a folder that holds a quantized language model."""
    return bool(ranks.programs_in(folder))


def check_holds_program(folder: Folder, program: ExportedProgram) -> None:
    """Raise an `MXError` for a folder, or a program, that cannot have packages."""
    if not is_quantized(folder):
        raise MXError(f"{str(folder)!r} holds no program: give the folder that save_pretrained wrote")
    if is_shard(program):
        raise MXError("a model that is divided among ranks has no packages: call compile() on each rank")


def save_folder(
    folder: Folder,
    program: ExportedProgram,
    recipe: MXQuantizer | str | None,
    *parts: Any,
    encoder: ExportedProgram | None = None,
) -> None:
    """Write the programs of a model, and the configurations and the tokenizer that transformers saves.

    Of a sharded model each rank writes its program, and the first one also the other files.

    Args:
        folder: the folder, which is made where it is missing.
        program: the program of the decoder.
        recipe: the quantizer, or its YAML, to put into the programs.
        parts: objects with `save_pretrained`, or None.
        encoder: the program of the encoder.

    Raises:
        MXError: where no file can be written there.
    """
    sharded = is_shard(program)
    writes_parts = ranks.is_first() or not sharded
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # the program is the largest file: until it is complete, the old files stay
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
            for part in parts:
                if part is not None and writes_parts:
                    save_part(part, temporary)
            if encoder is not None and writes_parts:
                save_program(encoder, Path(temporary) / ranks.ENCODER, recipe)
            overwrites = writes_parts and is_quantized(folder)
            save_program(program, Path(folder) / ranks.program_file(sharded), recipe)
            if overwrites:
                # a tokenizer of the old model would be loaded with the new one
                for name in (*_OPTIONAL, *ranks.programs_of_others(folder, sharded)):
                    (Path(folder) / name).unlink(missing_ok=True)
                for package in Path(folder).glob("*.aoti.pt2"):
                    package.unlink()
            for file in filter(Path.is_file, Path(temporary).rglob("*")):
                target = Path(folder) / file.relative_to(temporary)
                target.parent.mkdir(exist_ok=True)
                os.replace(file, target)
    except OSError as error:
        raise MXError(f"cannot write to {str(folder)!r}: {error.strerror}; give a folder") from None
    except ValueError as error:  # a generation config that contradicts itself
        raise MXError(f"cannot write to {str(folder)!r}: {error}") from error


def load_folder(folder: Folder) -> tuple[ExportedProgram, Any, Any, Any, ExportedProgram | None]:
    """Return what `LanguageModel` is made of: each may be None but the decoder's program and the configuration.

    Raises:
        MXError: where the folder holds no program, or programs for another number of ranks.
    """
    name = ranks.own_program_in(folder)
    configurations = import_extra("transformers.models.auto.configuration_auto", "hf")
    encoder = _read_program(folder, ranks.ENCODER) if (Path(folder) / ranks.ENCODER).is_file() else None
    program = _read_program(folder, name)
    with user_errors(f"read 'config.json' in {str(folder)!r}"):
        config = configurations.AutoConfig.from_pretrained(folder)
    generation = load_generation_config(folder)
    tokenizer = None if encoder is None else load_processor(folder)
    return program, config, generation, tokenizer or load_tokenizer(folder), encoder


def read_documents(folder: Folder) -> dict[str, bytes]:
    """Return the files in a model's folder that `save_folder` does not write: its card, recipe, report and terms, and
    what a processor needs."""
    patterns = (README, RECIPE, REPORT, *TERMS, *PROCESSOR)
    files = [file for pattern in patterns for file in Path(folder).glob(pattern)]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def write_documents(
    folder: Folder, kept: Mapping[str, bytes], recipe: MXQuantizer | str | None, base: str, name: str | None
) -> None:
    """Write the documents of a model to its folder.

    Args:
        folder: the folder, complete but for them.
        kept: the documents of the folder that the model was loaded from; empty for a model that was quantized here.
        recipe: the quantizer of the model, or its YAML.
        base: the folder of the float model, or its name on the Hub; "" if it is not known.
        name: the name of the model in its card; None: the name of the folder.
    """
    for file, content in kept.items():
        if file != README or may_write_card(folder):
            with whole_file(Path(folder) / file) as opened:
                opened.write(content)
    if recipe is not None:
        write_text(str(Provenance.here(recipe).recipe), Path(folder) / RECIPE)
    if README not in kept:
        write_card(folder, [origin_of(base)], name=name)


def _read_program(folder: Folder, name: str) -> ExportedProgram:
    with user_errors(f"read {name!r} in {str(folder)!r}"):
        return load_program(Path(folder) / name)
