"""Load the tokenizer, the processor and the settings of generation of a checkpoint, and save them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.gguf_model import gguf_in, tokenizer_of

#: the settings of generation
GENERATION = "generation_config.json"
#: the files of a tokenizer
TOKENIZER = (
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
#: the files of a processor
PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

#: the attribute by which a tokenizer of BPE cleans up spaces; older versions of transformers lack it, and clean up
_FORCED_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

Folder = str | os.PathLike[str]


def save_part(part: Any, folder: Folder) -> None:
    """Write a tokenizer, a processor or a configuration of transformers to a folder."""
    with user_errors(f"write the {type(part).__name__}"):
        part.save_pretrained(folder)


def load_generation_config(folder: Folder) -> Any:
    """Load the settings of generation of a checkpoint; return None where it has none."""
    if not (Path(folder) / GENERATION).is_file():
        return None
    with user_errors(f"read {GENERATION!r} in {str(folder)!r}"):
        generation = import_extra("transformers.generation.configuration_utils", "hf")
        return generation.GenerationConfig.from_pretrained(folder)


def load_processor(folder: Folder) -> Any:
    """Load the processor of a vision-language model, which has its tokenizer; return None where it has none."""
    if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in PROCESSOR):
        return None
    with user_errors(f"read the processor in {str(folder)!r}"):
        processor = import_extra("transformers", "hf").AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    _skip_ignored_clean_up(getattr(processor, "tokenizer", None))
    return processor


def load_tokenizer(folder: Folder) -> Any:
    """Load the tokenizer of a checkpoint; return None where it has none."""
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
    tokenizers = import_extra("transformers.models.auto.tokenization_auto", "hf")
    files = [name for name in TOKENIZER if (Path(folder) / name).is_file()]
    if Path(folder).is_dir() and not files:
        return None
    try:
        return tokenizers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # each tokenizer fails in its own way
        if not files:
            return None
        raise MXError(
            f"cannot read the tokenizer in {str(folder)!r}: {error}; remove its files, or replace them"
        ) from None
