"""Check the options of all commands.

`check_usage` needs no torch, whose import takes seconds. What needs torch, or the content of a checkpoint, a command
checks before its work by the functions at the end.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.cli.arguments import DESTINATIONS, NEW_TOKENS, OPSETS, YAML
from pt2mx.pt2e.cli.doctor_checks import COMPILER
from pt2mx.pt2e.files.archive import check_kind
from pt2mx.pt2e.files.output import check_distinct, check_output
from pt2mx.pt2e.language.ranges import fault_of
from pt2mx.pt2e.models.names import (
    IMAGES,
    KINDS,
    Normalization,
    check_checkpoint,
    check_model,
    input_files,
    source_file,
)
from pt2mx.pt2e.quantizer.shipped import check_source, names

#: options for loading a checkpoint
_OF_CHECKPOINTS = ("part", "allow_partial", "dtype")
#: options that prepare images
_OF_IMAGES = ("image_size", "mean", "std")
_SIZE = re.compile(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", re.ASCII)
#: arguments of `pt2mx.distill`, and the options of `quantize` that give them
_OF_DISTILL = ("epochs", "lr", "decay", "warmup", "accumulate", "recompute", "compile", "checkpoint")
TRAINING = tuple(f"distill_{name}" for name in _OF_DISTILL)
#: all options of `quantize` that --distill needs
_WITH_DISTILL = (*TRAINING, "distill_generated")
#: options of `quantize` -> their values that ask for nothing: not for an ONNX file; for a language model alone
_FOR_TORCH = {
    **dict.fromkeys(("optimize", "anchor", "distill", *_WITH_DISTILL, "text_length")),
    **{"compile": False, "tensor_parallel": 1, "device": "cpu"},
}
#: kind of `--model` -> its task, where `--for` chooses a recipe
_TASKS = {"minilm": "encoder", "torchvision": "cnn"}
_FOR_LANGUAGE_MODELS = {"tensor_parallel": 1, **dict.fromkeys(("distill", *_WITH_DISTILL, "text_length"))}
#: a name of the Hub; a few old ones have no owner
_REPOSITORY = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
#: suffixes of a report
_REPORTS = (".json", ".html", ".htm")
#: options that restrict the tokens to sample from
_FILTERS = ("top_k", "top_p", "repetition_penalty")
#: the smallest and the largest seed of torch
_SEEDS = (-(2**63), 2**64 - 1)
#: suffix of a file -> the command that writes such a file, or None
_FILES = {
    ".onnx": "export-onnx",
    ".pte": "export-executorch",
    ".safetensors": "save-checkpoint",
    **dict.fromkeys((".bin", ".gguf", ".json", ".npz", ".pt", ".pth", ".txt", ".yaml")),
}


#: command -> the suffixes of its --output, where each has them
_OUTPUTS = {
    "generate": (".txt", ".json"),
    "eval": (".json",),
    "run": (".pt", ".pth"),
    "export-onnx": (".onnx",),
    "export-executorch": (".pte",),
    "conformance": (".json", ".md"),
    "card": (".md",),
}
_WRITTEN_FOLDER, _TEXT = "the folder that `pt2mx quantize` wrote", "a text file, or a folder of .txt files"
_BATCHES = "a folder of batches, images or recordings, or for a language model a text"
#: command -> its arguments that name what must exist -> what to give
_EXISTING = {
    "quantize": {"calibration": _BATCHES, "distill": _TEXT},
    "compare": {"calibration": _BATCHES},
    "sensitivity": {"calibration": _BATCHES},
    "generate": {
        "folder": _WRITTEN_FOLDER,
        "prompt_file": "a file with a prompt",
        "image": "an image",
        "audio": "a .wav file",
    },
    "eval": {"folder": _WRITTEN_FOLDER},
    "perplexity": {"text": _TEXT, "calibration": _TEXT},
    "run": {"inputs": "a .pt or .npz batch"},
    "inspect": {"file": "a program, a package, an ONNX file, or the folder of a language model"},
    "save-checkpoint": {"folder": _WRITTEN_FOLDER},
    "card": {
        "folder": _WRITTEN_FOLDER,
        "report": "a report in JSON",
        "measured": "a file with the output of `pt2mx perplexity --json` or `pt2mx eval --json`",
    },
    "convert-checkpoint": {
        "source": "the folder of a checkpoint, or a GGUF file",
        "statistics": "a file of save_statistics",
    },
}
#: option -> its smallest value
_LEAST = {
    "max_new_tokens": 1,
    "tokens": 2,
    "limit": 1,
    "batch_size": 1,
    "max_length": 1,
    "fewshot": 0,
    "tensor_parallel": 1,
    "distill_epochs": 1,
    "distill_warmup": 0,
    "distill_accumulate": 1,
}


def check_usage(options: argparse.Namespace) -> None:
    """Raise an `MXError` for a wrong value that can be told without torch."""
    _check_destinations(options)
    if options.command in _OUTPUTS and options.output is not None:
        check_output(options.output, _OUTPUTS[options.command])
    if check := _CHECKS.get(options.command):
        check(options)
    for name, least in _LEAST.items():
        value = getattr(options, name, None)
        if value is not None and value < least:
            raise MXError(f"{option_of(name)} {value} must be at least {least}")
    for name, advice in _EXISTING.get(options.command, {}).items():
        _check_existing(getattr(options, name), advice)
    for path in getattr(options, "imports", None) or ():
        if not path.endswith(".py") or not os.path.isfile(path):
            raise MXError(f"--import {path!r} is no Python file: give a file.py that defines operators or formats")
    normalization_of(options)
    if getattr(options, "float", None) is not None:
        check_checkpoint(options.float)


def _check_existing(value: str | list[str] | None, advice: str) -> None:
    """Raise an `MXError` where a file or folder that an argument names is missing."""
    for path in [value] if isinstance(value, str) else value or ():
        if path != "none" and not os.path.exists(path):
            raise MXError(f"no file or folder {path!r}: give {advice}")


def _check_destinations(options: argparse.Namespace) -> None:
    for name in getattr(options, "destinations", ()):
        if name not in DESTINATIONS:
            raise MXError(f"--for {name!r} is no destination: {nearest(name, DESTINATIONS)}")


def _check_recipe(source: str, options: argparse.Namespace) -> None:
    """Check a recipe, unless files are still to be imported that may register its formats."""
    if not getattr(options, "imports", None):
        check_source(source)


def normalization_of(options: argparse.Namespace) -> Normalization | None:
    """Return how `--image-size`, `--mean` and `--std` prepare images; None without these options.

    Raises:
        MXError: for a wrong value, and for images that are not there.
    """
    given = {name: value for name in _OF_IMAGES if (value := getattr(options, name, None))}
    if not given:
        return None
    option, folder = option_of(next(iter(given))), options.calibration
    if folder in (None, "none") or IMAGES not in {KINDS[file.suffix.lower()] for file in input_files(folder)}:
        instead = f", not {folder!r}" * (folder is not None)
        raise MXError(f"{option} prepares images: give --calibration a folder of .png or .jpg images{instead}")
    if options.command == "quantize" and writes_folder(options):
        raise MXError(f"{option} is for a program: give --output a name that ends in .pt2, or leave it out")
    return Normalization(_size_of(options.image_size), _numbers("mean", options, 0.0), _numbers("std", options, 1.0))


def _size_of(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise MXError(f"--image-size {text!r} must be a number of pixels such as 224, or HEIGHTxWIDTH such as 240x320")
    return int(match[1]), int(match[2] or match[1])


def _numbers(name: str, options: argparse.Namespace, default: float) -> list[float]:
    """Return the numbers of an option, for each channel; those of `std` are positive."""
    try:
        numbers = [float(text) for text in getattr(options, name)] or [default]
    except ValueError:
        numbers = []
    given = ",".join(getattr(options, name))
    if name == "mean" and any(n > 1 for n in numbers):
        raise MXError(f"--mean {given} is above 1, and values of images are in [0, 1]: divide --mean and --std by 255")
    if not numbers or not all(math.isfinite(n) and (name == "mean" or n > 0) for n in numbers):
        positive = " above 0" * (name == "std")
        raise MXError(f"--{name} {given} must be numbers{positive}, such as 0.485,0.456,0.406")
    return numbers


def _check_quantize(options: argparse.Namespace) -> None:
    _check_float_model(options)
    if options.recipe is not None:
        _check_recipe(options.recipe, options)
    elif not options.model.startswith("hf:"):
        chosen_recipe(options)
    if writes_folder(options):
        if options.anchor is not None:
            raise MXError("--anchor is for a program: give --output a name that ends in .pt2")
        _check_training(options)
        return  # a language model
    _check_report(options, _files_of(options))
    if options.model.startswith("onnx:"):
        _check_onnx_model(options, options.model.removeprefix("onnx:"))
        return
    check_program_name(options.output)
    for name, nothing in _FOR_LANGUAGE_MODELS.items():
        if getattr(options, name) != nothing:
            text = f"{option_of(name)} is for a language model: give --model hf:NAME, and --output a folder"
            raise MXError(text + "; or pt2mx.distill" * (name == "distill"))


def _check_training(options: argparse.Namespace) -> None:
    if options.distill is None and (given := [name for name in _WITH_DISTILL if getattr(options, name) is not None]):
        raise MXError(f"{option_of(given[0])} says how --distill trains: give --distill a text")
    if options.distill is not None and options.tensor_parallel != 1:
        raise MXError("--distill trains a whole model: leave --tensor-parallel out")
    if options.distill_lr is not None and not 0 < options.distill_lr < math.inf:
        raise MXError(f"--distill-lr {options.distill_lr:g} must be a finite number above 0")


def _check_onnx_model(options: argparse.Namespace, path: str) -> None:
    for name, nothing in _FOR_TORCH.items():
        if getattr(options, name) != nothing:
            raise MXError(f"{option_of(name)} is for PyTorch models: leave it out for an ONNX file")
    if not Path(path).is_file():
        raise MXError(f"no file {path!r}: give onnx:FILE, a float ONNX file")
    check_output(options.output, suffixes=(".onnx",))
    check_distinct({"--output": options.output, "--report": options.report}, {"the model": path})


def _check_slice(options: argparse.Namespace) -> None:
    _check_recipe(options.recipe, options)
    _check_report(options)
    if not Path(options.program).is_dir():
        check_program_name(options.output)
        _check_program(options)
        return
    if Path(options.output).suffix.lower() == ".pt2":
        raise MXError(f"{options.program!r} is a language model: give --output a folder, not {options.output!r}")
    check_folder_name(options.output, options.program)
    if Path(options.program).resolve() in Path(options.output).resolve().parents:
        raise MXError(f"--output {options.output!r} lies in {options.program!r}: give a folder outside of it")


def _check_compare(options: argparse.Namespace) -> None:
    _check_evaluated_model(options)
    _check_eval_output(options, (".html", ".htm"), options.recipes)


def _check_sensitivity(options: argparse.Namespace) -> None:
    _check_evaluated_model(options)
    if (options.bits is None) != (options.output is None):
        raise MXError("--bits and --output go together: the bits of the recipe, and the file to write it to")
    _check_eval_output(options, YAML)
    if options.bits is None and options.activation is not None:
        raise MXError("--activation is of the recipe: give --bits and --output, too")
    if options.bits is not None and options.operands == "activations":
        raise MXError("--bits chooses formats of weights: give --operands weights or both")
    if options.left and options.method == "gradient":
        raise MXError("--left is measured: give --method forward or both")


def _check_generate(options: argparse.Namespace) -> None:
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
    if not _SEEDS[0] <= options.seed <= _SEEDS[1]:
        raise MXError(f"--seed {options.seed} must be an integer from {_SEEDS[0]} to {_SEEDS[1]}")
    for name in ("temperature", *_FILTERS):
        value = getattr(options, name)
        if value is not None and (fault := fault_of(name, value)):
            raise MXError(f"{option_of(name)} {value} {fault}")
    for name in ("top_k", "top_p"):
        if getattr(options, name) is not None and options.temperature == 0:
            raise MXError(f"{option_of(name)} is for sampling: give --temperature, too")


def generation_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of transformers' `generate` that the options of `pt2mx generate` ask for."""
    settings = {"max_new_tokens": options.max_new_tokens or NEW_TOKENS, "do_sample": options.temperature > 0}
    settings |= {"temperature": options.temperature} if settings["do_sample"] else {"top_k": None, "top_p": None}
    settings |= {name: getattr(options, name) for name in _FILTERS if getattr(options, name) is not None}
    return settings | ({"stop_strings": options.stop} if options.stop else {})


def _check_perplexity(options: argparse.Namespace) -> None:
    for recipe in options.recipe:
        _check_recipe(recipe, options)


def _check_eval(options: argparse.Namespace) -> None:
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise MXError(f"--include-path {options.include_path!r} is no folder: give one with YAML files of tasks")


def _check_compile(options: argparse.Namespace) -> None:
    if not Path(options.program).is_dir():
        if options.output is None:
            check_kind(options.program, "program")
            raise MXError("give --output, the package to write: a name that ends in .pt2")
        _check_program(options)
        return
    for name in ("output", "portable", "unpack"):
        if getattr(options, name):
            raise MXError(
                f"{option_of(name)} is not for a language model: its packages are written to {options.program!r}"
            )


def _check_run(options: argparse.Namespace) -> None:
    is_onnx = Path(options.package).suffix == ".onnx"
    if not is_onnx and options.runtime is not None:
        raise MXError("--runtime is for ONNX files: leave it out for a package")
    if is_onnx and options.benchmark:
        raise MXError("--benchmark is for packages: leave it out for an ONNX file, whose call is timed alone")
    if not is_onnx and not Path(options.package).is_dir():
        check_kind(options.package, "package")
    check_distinct({"--output": options.output}, {"the package": options.package, "--inputs": options.inputs})
    if is_onnx and not Path(options.package).is_file():
        raise MXError(f"no file {options.package!r}: give a package, or an ONNX file")
    if options.float is not None:
        if not options.benchmark:
            raise MXError("--float goes with --benchmark: the program to time beside the package")
        check_kind(options.float, "program")
    if is_onnx and options.inputs is None:
        raise MXError("an ONNX file has no example inputs: give --inputs, a .pt or .npz batch")


def _check_export_onnx(options: argparse.Namespace) -> None:
    if options.opset is not None and not OPSETS[0] <= options.opset <= OPSETS[1]:
        raise MXError(f"--opset {options.opset} must be an integer from {OPSETS[0]} to {OPSETS[1]}")
    if not Path(options.program).is_dir():
        _check_program(options)


def _check_export_executorch(options: argparse.Namespace) -> None:
    if options.max_size is not None and options.max_size < 2:
        raise MXError(f"--max-size {options.max_size} must be an integer of at least 2")
    _check_program(options)


def _check_recipes(options: argparse.Namespace) -> None:
    if hasattr(options, "recipe"):
        _check_recipe(options.recipe, options)
    if getattr(options, "model", None) is not None:
        check_model(options.model)


def _check_card(options: argparse.Namespace) -> None:
    for name in ("name", "base_model"):
        value = getattr(options, name)
        if value is not None and not _REPOSITORY.fullmatch(value):
            raise MXError(f"{option_of(name)} {value!r} is no name of the Hub: give owner/name")


_CHECKS: dict[str, Callable[[argparse.Namespace], None]] = {
    "quantize": _check_quantize,
    "slice": _check_slice,
    "compare": _check_compare,
    "sensitivity": _check_sensitivity,
    "generate": _check_generate,
    "perplexity": _check_perplexity,
    "eval": _check_eval,
    "compile": _check_compile,
    "run": _check_run,
    "export-onnx": _check_export_onnx,
    "export-executorch": _check_export_executorch,
    "card": _check_card,
    "recipes": _check_recipes,
}


def option_of(name: str) -> str:
    """Return the option that fills an attribute of the options."""
    return f"--{name.replace('_', '-')}"


def _check_float_model(options: argparse.Namespace) -> None:
    check_model(options.model)
    used = [name for name in _OF_CHECKPOINTS if getattr(options, name, None)]
    if used and not options.model.startswith("hf:"):
        raise MXError(f"{option_of(used[0])} is for checkpoints (hf:NAME), and {options.model!r} is none")


def _check_evaluated_model(options: argparse.Namespace) -> None:
    _check_float_model(options)
    if options.model.startswith("onnx:"):
        raise MXError("an ONNX file is not taken here: `pt2mx quantize --model onnx:FILE` compares its outputs")
    if options.calibration == "none":
        raise MXError("--calibration none leaves no batch to evaluate on: give a folder, or leave it out")


def _check_eval_output(options: argparse.Namespace, suffixes: tuple[str, ...], recipes: Iterable[str] = ()) -> None:
    if options.output is not None:
        files = _files_of(options) | {f"the recipe {name!r}": name for name in recipes if os.path.isfile(name)}
        check_distinct({"--output": options.output}, files)
        check_output(options.output, suffixes)


def _check_report(options: argparse.Namespace, files: dict[str, object] | None = None) -> None:
    """Raise an `MXError` where `options.report` cannot be written, or a file is given twice."""
    if options.report is not None:
        check_output(options.report, suffixes=_REPORTS)
    recipe_file = options.recipe if options.recipe is not None and os.path.isfile(options.recipe) else None
    check_distinct({"--output": options.output, "--report": options.report}, {"--recipe": recipe_file, **(files or {})})


def _check_program(options: argparse.Namespace) -> None:
    check_kind(options.program, "program")
    check_distinct({"--output": options.output}, {"the program": options.program})


def _files_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the user's files that `options.model` and `options.calibration` name, by their description in errors."""
    files: dict[str, object] = {"the model": source_file(options.model)}
    if options.model.startswith("hf:"):
        folder = Path(options.model.removeprefix("hf:"))
        files |= {f"the checkpoint's file {file.name!r}": file for file in folder.glob("*")}
    if options.calibration not in (None, "none"):
        files |= {f"the calibration batch {file.name!r}": file for file in input_files(options.calibration)}
    return files


def writes_folder(options: argparse.Namespace) -> bool:
    """Return whether `pt2mx quantize` writes the folder of a language model."""
    return options.model.startswith("hf:") and Path(options.output).suffix.lower() != ".pt2"


def chosen_recipe(options: argparse.Namespace) -> str:
    """Return `--recipe`, or with `--for` one for the task of the model.

    Raises:
        MXError: for a model in float without a recipe, whose task is not known.
    """
    if options.recipe is not None:
        recipe: str = options.recipe
        return recipe
    task = "decoder" if writes_folder(options) else _TASKS.get(options.model.partition(":")[0])
    if not options.destinations or task is None:
        raise MXError(f"give --recipe, a YAML file, a format, or one of {', '.join(names())}")
    return f"{task}_balanced"


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


def check_device(device: str) -> None:
    """Raise an `MXError` for a device that this machine lacks."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise MXError("--device cuda needs an NVIDIA GPU and a torch that is built for it: leave it out for the CPU")


def check_compiler() -> None:
    """Raise an `MXError` without a C++ compiler: Inductor needs one, on a GPU too."""
    from torch._inductor import cpp_builder

    from pt2mx.pt2e.files.user_errors import one_line

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        raise MXError(
            f"there is no C++ compiler ({one_line(error)}): {COMPILER}; `pt2mx doctor` looks for it"
        ) from error
