"""The command `pt2mx quantize` of a float ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.batches import arrays_by_name, batch_files, load_batches
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result, quantized_result
from pt2mx.pt2e.files.output import check_distinct, check_output
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.onnx.quantize.quantize_onnx import OnnxReport, quantize_onnx
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

#: of `--model`
PREFIX = "onnx:"
#: options that are for torch models -> the value that asks for nothing
_FOR_TORCH = {
    **dict.fromkeys(("optimize", "anchor", "distill", "text_length")),
    **{"compile": False, "tensor_parallel": 1, "device": "cpu"},
}


def quantize_file(options: argparse.Namespace, quantizer: MXQuantizer) -> tuple[OnnxReport, Result]:
    """Quantize the file of `options.model` to `options.output`.

    Args:
        options: the options of `pt2mx quantize`.
        quantizer: the quantizer of `options.recipe`.

    Returns:
        The report of `pt2mx.quantize_onnx`, and the result of the command.

    Raises:
        MXError: for an option that is not for ONNX files, and as `pt2mx.quantize_onnx`.
    """
    path = options.model.removeprefix(PREFIX)
    _check(options, path)
    with Progress(2) as progress:
        batches = _load_batches(options, path)
        progress.begin("quantize")
        with user_errors(f"quantize {path!r}"):
            report = quantize_onnx(path, options.output, quantizer, batches, allow_nan=options.allow_nan)
    size = [f"the float file: {Path(path).stat().st_size / 1e6:.1f} MB"]
    result = quantized_result(report, options, progress, lines=size, output_against_the_float_model=report.fidelity)
    return report, result


def _check(options: argparse.Namespace, path: str) -> None:
    for name, value in _FOR_TORCH.items():
        if getattr(options, name) != value:
            raise MXError(f"--{name.replace('_', '-')} is for PyTorch models: leave it out for an ONNX file")
    if not Path(path).is_file():
        raise MXError(f"no file {path!r}: give onnx:FILE, a float ONNX file")
    check_output(options.output, suffixes=(".onnx",))
    check_distinct({"--output": options.output, "--report": options.report}, {"the model": path})


def _load_batches(options: argparse.Namespace, path: str) -> list[dict[str, np.ndarray]] | None:
    """Load the batches of `--calibration`, each by the names of the inputs; None without any."""
    if options.calibration in (None, "none"):
        return None
    with user_errors(f"read {path!r}"):
        graph = import_extra("onnx", "onnx").load(path, load_external_data=False).graph
    initializers = {tensor.name for tensor in graph.initializer}
    names = [value.name for value in graph.input if value.name not in initializers]
    check_distinct({"--output": options.output}, {f.name: f for f in batch_files(options.calibration)})
    return [arrays_by_name(batch, names, file) for file, batch in load_batches(options.calibration, {}).items()]
