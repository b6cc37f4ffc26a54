"""`pt2mx quantize --model onnx:FILE`: a float ONNX file becomes one in MX formats."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.calibration import batch_files, load_batches
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.cli.summary import quantized
from pt2mx.pt2e.onnx.quantize.quantize_onnx import OnnxReport, quantize_onnx
from pt2mx.pt2e.output import check_distinct, check_output
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.user_errors import user_errors

#: of `--model`
PREFIX = "onnx:"
#: options that are for torch models -> the value that asks for nothing
_FOR_TORCH = {"optimize": None, "compile": False, "tensor_parallel": 1, "device": "cpu"}


def quantize_file(options: argparse.Namespace, quantizer: MXQuantizer) -> tuple[OnnxReport, Result]:
    """Quantize the file of `options.model` to `options.output`.

    Args:
        options: those of `pt2mx quantize`.
        quantizer: that of `options.recipe`.

    Returns:
        The report of `pt2mx.quantize_onnx`, and what the command prints.

    Raises:
        MXError: for an option that is not for ONNX files, and as `pt2mx.quantize_onnx`.
    """
    path = options.model.removeprefix(PREFIX)
    _check(options, path)
    with Progress(2) as progress:
        batches = _batches(options, path)
        progress.begin("quantize")
        with user_errors(f"quantize {path!r}"):
            report = quantize_onnx(path, options.output, quantizer, batches, allow_nan=options.allow_nan)
    before = [f"the float file: {Path(path).stat().st_size / 1e6:.1f} MB"]
    return report, quantized(report, options, progress, lines=before, output_against_the_float_model=report.fidelity)


def _check(options: argparse.Namespace, path: str) -> None:
    for name, value in _FOR_TORCH.items():
        if getattr(options, name) != value:
            raise MXError(f"--{name.replace('_', '-')} is for PyTorch models: leave it out for an ONNX file")
    if not Path(path).is_file():
        raise MXError(f"no file {path!r}: give onnx:FILE, a float ONNX file")
    check_output(options.output, suffixes=(".onnx",))
    check_distinct({"--output": options.output, "--report": options.report}, {"the model": path})


def _batches(options: argparse.Namespace, path: str) -> list[dict[str, np.ndarray]] | None:
    """The batches of `--calibration` by the names of the inputs; None without one."""
    if options.calibration in (None, "none"):
        return None
    with user_errors(f"read {path!r}"):
        graph = import_extra("onnx", "onnx").load(path, load_external_data=False).graph
    held = {tensor.name for tensor in graph.initializer}
    names = [value.name for value in graph.input if value.name not in held]
    check_distinct({"--output": options.output}, {f.name: f for f in batch_files(options.calibration)})
    return [_batch(given, names, file) for file, given in load_batches(options.calibration, {}).items()]


def _batch(given: object, names: list[str], file: str) -> dict[str, np.ndarray]:
    """A batch of a file, by the names of the inputs."""
    if isinstance(given, dict):
        named: dict[Any, Any] = given
    else:
        values = list(given) if isinstance(given, list | tuple) else [given]
        named = dict(zip(names if len(values) == len(names) else range(len(values)), values, strict=True))
    if set(named) != set(names):
        raise MXError(f"{file}: a batch must hold the inputs {names}, this one holds {list(named)}")
    with user_errors(f"make arrays of {file}"):  # numpy has no bfloat16
        return {name: torch.as_tensor(value).numpy() for name, value in named.items()}
