"""Check a command line further than argparse: files, recipes, models and ranges. This module imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.cli.arguments import OPSETS
from pt2mx.pt2e.files.archive import check_kind
from pt2mx.pt2e.files.output import check_output
from pt2mx.pt2e.language.ranges import fault_of
from pt2mx.pt2e.quantizer.shipped import check_source, names

#: the models that `--model` takes, as errors name them
_MODELS = ("minilm", "torchvision:NAME", "hf:DIRECTORY_OR_NAME", "module.py:factory")
#: options for loading a checkpoint
_OF_CHECKPOINTS = ("part", "allow_partial", "dtype")
#: options that restrict the tokens to sample from
_FILTERS = ("top_k", "top_p", "repetition_penalty")
#: the smallest and the largest seed of torch
_SEEDS = (-(2**63), 2**64 - 1)


def check_usage(options: argparse.Namespace) -> None:
    """Raise an `MXError` for a wrong value that can be told without torch, whose import takes seconds."""
    for name, check in _CHECKS.items():
        if hasattr(options, name):
            check(options)


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


def generation_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of transformers' `generate` that the options of `pt2mx generate` ask for.

    Raises:
        MXError: for a value out of its range, and for options that contradict each other.
    """
    _check_prompts(options)
    if options.max_new_tokens < 1:
        raise MXError(f"--max-new-tokens {options.max_new_tokens} must be at least 1")
    if not _SEEDS[0] <= options.seed <= _SEEDS[1]:
        raise MXError(f"--seed {options.seed} must be an integer from {_SEEDS[0]} to {_SEEDS[1]}")
    for name in ("temperature", *_FILTERS):
        value = getattr(options, name)
        if value is not None and (fault := fault_of(name, value)):
            raise MXError(f"--{name.replace('_', '-')} {value} {fault}")
    filters = {name: getattr(options, name) for name in _FILTERS if getattr(options, name) is not None}
    sampled = options.temperature > 0
    if not sampled and (unused := sorted(filters.keys() & {"top_k", "top_p"})):
        raise MXError(f"--{unused[0].replace('_', '-')} is for sampling: give --temperature, too")
    temperature = {"temperature": options.temperature} if sampled else {"top_k": None, "top_p": None}
    stops = {"stop_strings": options.stop} if options.stop else {}
    return {"max_new_tokens": options.max_new_tokens, "do_sample": sampled, **temperature, **filters, **stops}


def _check_prompts(options: argparse.Namespace) -> None:
    if options.audio and (options.prompt or options.prompt_file or options.chat):
        raise MXError("--audio takes no prompt: leave --prompt, --prompt-file and --chat out")
    if options.system and not options.chat:
        raise MXError("--system is for a chat: give --chat, too")
    if options.system and options.image:
        raise MXError("--system is for text: leave --image out")
    if options.dtype and options.float is None:
        raise MXError("--dtype is for the checkpoint of --float: give it, too")
    if options.stop and "" in options.stop:
        raise MXError("--stop is empty: give the text that ends an answer")
    if options.output is not None:
        check_output(options.output, (".txt", ".json"))


def recipe_missing() -> MXError:
    """Return the error for a model in float without a recipe."""
    return MXError(f"give --recipe, a YAML file, a format, or one of {', '.join(names())}")


def _check_model(options: argparse.Namespace) -> None:
    if options.model is None:  # of `recipes check` it is optional
        return
    check_model(options.model)
    used = [name for name in _OF_CHECKPOINTS if getattr(options, name, None)]
    if used and not options.model.startswith("hf:"):
        raise MXError(f"--{used[0].replace('_', '-')} is for checkpoints (hf:NAME), and {options.model!r} is none")


def _check_recipe(options: argparse.Namespace) -> None:
    if options.recipe is None and not getattr(options, "model", "hf:").startswith("hf:"):
        raise recipe_missing()
    for source in options.recipe if isinstance(options.recipe, list) else [options.recipe or "mxfp8"]:
        check_source(source)


def _check_archive(kind: str, options: argparse.Namespace) -> None:
    path = Path(getattr(options, kind))
    if not path.is_dir() and path.suffix != ".onnx":  # the folder of a language model; a file that `run` takes
        check_kind(path, kind)


def _check_onnx(options: argparse.Namespace) -> None:
    check_output(options.output, (".onnx",))
    if options.opset is not None and not OPSETS[0] <= options.opset <= OPSETS[1]:
        raise MXError(f"--opset {options.opset} must be an integer from {OPSETS[0]} to {OPSETS[1]}")


def _check_executorch(options: argparse.Namespace) -> None:
    check_output(options.output, (".pte",))
    if options.max_size is not None and options.max_size < 2:
        raise MXError(f"--max-size {options.max_size} must be an integer of at least 2")


#: name of an argument -> the check of the options of a command that has it
_CHECKS = {
    "model": _check_model,
    "recipe": _check_recipe,
    "program": lambda options: _check_archive("program", options),
    "package": lambda options: _check_archive("package", options),
    "max_new_tokens": generation_settings,
    "opset": _check_onnx,
    "max_size": _check_executorch,
}
