"""Read and write the folder of a language model: program, configurations, tokenizer and report."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.gguf_model import gguf_in, tokenizer_of
from pt2mx.pt2e.files.output import whole_file
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language import ranks
from pt2mx.pt2e.language.tensor_parallel import is_shard
from pt2mx.pt2e.program.program import load_program, save_program
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

#: in the folder, next to the files that transformers writes
REPORT = "report.json"

_GENERATION = "generation_config.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "normalizer.json",
)
_PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
#: files that the folder of a model may lack
_OPTIONAL = (REPORT, ranks.ENCODER, _GENERATION, *_TOKENIZER, *_PROCESSOR)

#: the attribute by which a tokenizer of BPE cleans up spaces; older versions of transformers lack it, and clean up
_FORCED_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

Folder = str | os.PathLike[str]


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
        raise MXError(f"cannot write to {str(folder)!r}: {error}") from None


def save_part(part: Any, folder: Folder) -> None:
    """Write a tokenizer, a processor or a configuration of transformers to a folder.

    Raises:
        MXError: where it cannot be written: tokenizers raise errors of no class of their own.
    """
    with user_errors(f"write the {type(part).__name__}"):
        part.save_pretrained(folder)


def load_folder(folder: Folder) -> tuple[ExportedProgram, Any, Any, Any, ExportedProgram | None]:
    """Return what `LanguageModel` is made of: each may be None but the decoder's program and the configuration.

    Raises:
        MXError: where the folder holds no program, or programs for another number of ranks.
    """
    name = ranks.own_program_in(folder)
    transformers = import_extra("transformers", "hf")
    encoder = _read_program(folder, ranks.ENCODER) if (Path(folder) / ranks.ENCODER).is_file() else None
    program = _read_program(folder, name)
    with user_errors(f"read 'config.json' in {str(folder)!r}"):
        config = transformers.AutoConfig.from_pretrained(folder)
    generation = None
    if (Path(folder) / _GENERATION).is_file():
        with user_errors(f"read {_GENERATION!r} in {str(folder)!r}"):
            generation = transformers.GenerationConfig.from_pretrained(folder)
    tokenizer = None if encoder is None else load_processor(folder)
    return program, config, generation, tokenizer or load_tokenizer(folder), encoder


def _read_program(folder: Folder, name: str) -> ExportedProgram:
    with user_errors(f"read {name!r} in {str(folder)!r}"):
        return load_program(Path(folder) / name)


def load_processor(folder: Folder) -> Any:
    """Load the processor of a vision-language model, which has its tokenizer; return None where it has none.

    Raises:
        MXError: where a file of the processor cannot be read.
    """
    if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in _PROCESSOR):
        return None
    with user_errors(f"read the processor in {str(folder)!r}"):
        processor = import_extra("transformers", "hf").AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    _skip_ignored_clean_up(getattr(processor, "tokenizer", None))
    return processor


def copy_processor(folder: Folder, to: Folder) -> None:
    """Copy the configurations of a processor that `to` lacks, such as the one of a feature extractor: a model does not
    load it.

    Raises:
        MXError: where one cannot be written.
    """
    for name in _PROCESSOR:
        if (Path(folder) / name).is_file() and not (Path(to) / name).exists():
            with whole_file(Path(to) / name) as file:
                file.write((Path(folder) / name).read_bytes())


def load_tokenizer(folder: Folder) -> Any:
    """Load the tokenizer of a checkpoint; return None where it has none.

    Raises:
        MXError: where a file of the tokenizer cannot be read.
    """
    file = gguf_in(folder)
    tokenizer = _read_tokenizer(folder) if file is None else tokenizer_of(file)
    _skip_ignored_clean_up(tokenizer)
    return tokenizer


def _skip_ignored_clean_up(tokenizer: Any) -> None:
    """Switch a tokenizer's clean-up of spaces off where transformers would ignore it with a warning: for BPE."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if type(model).__name__ == "BPE" and not getattr(tokenizer, _FORCED_CLEAN_UP, True):
        tokenizer.clean_up_tokenization_spaces = False


def _read_tokenizer(folder: Folder) -> Any:
    transformers = import_extra("transformers", "hf")
    files = [name for name in _TOKENIZER if (Path(folder) / name).is_file()]
    if Path(folder).is_dir() and not files:
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # each tokenizer fails in its own way
        if not files:
            return None
        raise MXError(
            f"cannot read the tokenizer in {str(folder)!r}: {error}; remove its files, or replace them"
        ) from None
