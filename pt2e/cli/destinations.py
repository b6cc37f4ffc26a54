"""`pt2mx quantize --for`: the recipe in a form that destinations take, and the commands that bring the result there."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.destinations import Form, destination_named, for_destinations, next_command
from pt2mx.pt2e.cli.checks import writes_folder
from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.cli.result import Result

#: destinations of a quantized ONNX file
_OF_ONNX_FILES = ("onnx", "openvino")


def form_of(options: argparse.Namespace) -> Form:
    """Return what the options of `quantize` say of the recipe, for `--for` in a form that all destinations take.

    Raises:
        MXError: where a destination takes no form of it, or not what the command writes.
    """
    form = for_destinations(options.recipe, options.destinations, options.optimize)
    for name in options.destinations:
        _check_kind(name, options)
    if options.dtype is None and any(layout.dtypes == (torch.bfloat16,) for layout in form.layouts.values()):
        options.dtype = "bfloat16"
        form.changes.append("the model in bfloat16, in which libraries that load it compute")
    for change in form.changes:
        note(change)
    return form


def _check_kind(name: str, options: argparse.Namespace) -> None:
    """Raise an `MXError` where a destination does not take what the command writes."""
    destination = destination_named(name)
    if options.model.startswith("onnx:"):
        if name not in _OF_ONNX_FILES:
            raise MXError(f"--for {name} takes no ONNX file: leave it out, or give {' or '.join(_OF_ONNX_FILES)}")
    elif writes_folder(options) and not destination.folders:
        raise MXError(f"--for {name} takes a program: give --output a name that ends in .pt2")
    elif not writes_folder(options) and not destination.programs:
        raise MXError(f"--for {name} takes a language model: give --model hf:NAME, and --output a folder")


def with_next_steps(result: Result, form: Form, options: argparse.Namespace) -> Result:
    """Return the result of `quantize` with the command for each destination that takes more than this one."""
    model = options.model.partition(":")[2]
    commands = {name: next_command(form, name, model, options.output) for name in options.destinations}
    if options.model.startswith("onnx:"):
        commands = {}
    lines = [f"for {name}: {command}" for name, command in commands.items() if command]
    data = {"changes": form.changes, "next": {name: command for name, command in commands.items() if command}}
    return replace(result, text="\n".join([result.text, *lines]), data=result.data | data)
