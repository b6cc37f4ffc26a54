"""Load models of transformers from a folder, a GGUF file, or a name on the hub. No code of a checkpoint is run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import one_line, user_errors
from pt2mx.pt2e.models.build_model import check_counts
from pt2mx.pt2e.models.checkpoint_files import entries_in, files_of
from pt2mx.pt2e.models.coverage import CheckpointValues
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_model import config_of, gguf_in
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: a local folder, a GGUF file, or a name on the hub
Name = str | os.PathLike[str]


def load_pretrained(name: Name, dtype: str | None = None) -> PreTrainedModel:
    """Load the model that the configuration of a checkpoint names, ready for export; by default in its own dtype."""
    transformers = import_extra("transformers", "hf")
    with _errors_of_loading(f"{name!r} is no Hugging Face checkpoint", "a local folder works offline"):
        fields = {} if gguf_in(name) else transformers.PretrainedConfig.get_config_dict(name)[0]
        architecture = (fields.get("architectures") or ["AutoModel"])[0]
        module = load_as(getattr(transformers, architecture, transformers.AutoModel), name, dtype)
    # a program without transformers' output types loads where transformers is not installed
    module.register_forward_hook(lambda module, inputs, output: output.to_tuple())
    for part in module.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False  # a cache is no tensor, and export takes tensors
    return module


def load_language_model(
    name: Name, part: str | None = None, allow_partial: bool = False, dtype: str | None = None
) -> PreTrainedModel:
    """Load the language model of a checkpoint, with its vision tower, or its encoder, where it has one.

    By default it has its own dtype. `Coverage.check` says which tensors `part` and `allow_partial` let it leave out.
    """
    hint = "a local folder works offline; for another model give --output a name that ends in .pt2"
    with _errors_of_loading(f"{name!r} is no language model", hint):
        model = load_as(_language_model_class(name), name, dtype)
        checkpoint_values(model, name).held_by().check(part, allow_partial)
    return model


def load_as(architecture: type[PreTrainedModel], name: Name, dtype: str | None = None) -> PreTrainedModel:
    """Return `architecture.from_pretrained(name)` in evaluation mode, without a progress bar; by default in its own
    dtype. pt2mx never runs code of a checkpoint."""
    from transformers.utils import logging

    if (file := gguf_in(name)) is not None:
        return load_float_gguf(file, None if dtype is None else getattr(torch, dtype))
    _check_buildable(name)
    logging.disable_progress_bar()
    return architecture.from_pretrained(name, dtype=dtype or "auto", trust_remote_code=False).eval()


def build_without_weights(name: Name) -> PreTrainedModel:
    """Return the causal language model of a checkpoint on the meta device."""
    transformers = import_extra("transformers", "hf")
    with user_errors(f"read the configuration of {name!r}"):
        if (file := gguf_in(name)) is not None:
            config = config_of(GGUFFile(file))
        else:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config).eval()


def checkpoint_values(model: PreTrainedModel, name: Name) -> CheckpointValues:
    """Return the values of the checkpoint from which a model was loaded; without files on disk, the values of the
    model."""
    return CheckpointValues(model, None if gguf_in(name) else entries_in(files_of(name)) or None)


@contextmanager
def _errors_of_loading(what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except MXError:
        raise
    except Exception as error:  # any of the libraries that read a checkpoint may raise anything
        raise MXError(f"{what} that can be loaded ({hint}): {one_line(error)}") from None


def _language_model_class(name: Name) -> Any:
    transformers = import_extra("transformers", "hf")
    if gguf_in(name) is None:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return transformers.AutoModelForImageTextToText
        if config.is_encoder_decoder:
            is_speech = type(config) in transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
            return transformers.AutoModelForSpeechSeq2Seq if is_speech else transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _check_buildable(name: Name) -> None:
    """Raise an `MXError` where transformers itself lacks the model, or the files do not hold it."""
    transformers = import_extra("transformers", "hf")
    fields, _ = transformers.PretrainedConfig.get_config_dict(name)
    if entries := entries_in(files_of(name)):
        check_counts(fields, [entry.shape for entry in entries.values()], str(name))
    remote = fields.get("auto_map")
    known = fields.get("model_type") in transformers.CONFIG_MAPPING
    if remote and not (known and all(hasattr(transformers, name) for name in fields.get("architectures") or ())):
        files = sorted({f"{reference.rpartition('.')[0]}.py" for reference in remote.values()})
        raise MXError(
            f"{str(name)!r} needs code of its own, which is not run: {', '.join(files)}. Where you trust it, give "
            "--model module.py:factory, a function that loads the model with trust_remote_code=True and returns "
            "(model, example_inputs)"
        )
