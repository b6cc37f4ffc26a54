"""The model of `pt2mx compare` and `pt2mx sensitivity`, and the metric by which its output is judged."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.checked_model import check_checkpoint_options, input_files
from pt2mx.pt2e.cli.devices import check_device
from pt2mx.pt2e.cli.models import LoadedModel
from pt2mx.pt2e.output import check_distinct, check_output

#: architectures of transformers that give logits
_LOGITS = re.compile(r"For\w*(Classification|LM|CTC|Generation|PreTraining)$|LMHeadModel$")


def check_judged_model(options: argparse.Namespace) -> None:
    """Raise an `MXError` for options that cannot be, before the work."""
    check_device(options.device)
    check_checkpoint_options(options)
    if options.model.startswith("onnx:"):
        raise MXError("an ONNX file is not taken here: `pt2mx quantize --model onnx:FILE` compares its outputs")
    if options.calibration == "none":
        raise MXError("--calibration none leaves no batch to judge by: give a folder, or leave it out")


def check_written(options: argparse.Namespace, recipes: Iterable[str] = (), suffixes: tuple[str, ...] = ()) -> None:
    """Raise an `MXError` where `options.output` cannot be written, or is a file of the model, the calibration or
    `recipes`."""
    check_output(options.output, suffixes)
    read = {f"the recipe {name!r}": name for name in recipes if os.path.isfile(name)}
    check_distinct({"--output": options.output}, {**input_files(options), **read})


def names_in(text: str) -> list[str]:
    """Return the names in an option, with commas and blanks between."""
    return [name.strip() for name in text.split(",")]


def counted(batches: Sequence[object]) -> str:
    """Return how many batches there are, in words."""
    return f"{len(batches)} batch{'es' * (len(batches) != 1)}"


def metric_of(options: argparse.Namespace, loaded: LoadedModel) -> str:
    """Return the metric of the options, by default the one that fits the model."""
    if options.metric is not None:
        return options.metric
    logits = options.model.startswith("torchvision:") or _LOGITS.search(type(loaded.module).__name__)
    return "kl" if logits else "cosine"
