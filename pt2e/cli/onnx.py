"""ONNX on the command line: `export-onnx` of a program, and `quantize` of a float ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.batches import batch_files, load_batches
from pt2mx.pt2e.cli.option_checks import check_program_file
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result, quantized_result
from pt2mx.pt2e.onnx.export import export_onnx
from pt2mx.pt2e.onnx.quantize.quantize_onnx import OnnxReport, quantize_onnx
from pt2mx.pt2e.onnx.runtime import RUNTIMES, load
from pt2mx.pt2e.output import check_distinct, check_output
from pt2mx.pt2e.program import read_program
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.agreement import fidelity
from pt2mx.pt2e.user_errors import user_errors

#: of `--model`
PREFIX = "onnx:"
#: options that are for torch models -> the value that asks for nothing
_FOR_TORCH = {
    **dict.fromkeys(("optimize", "anchor", "distill", "text_length")),
    **{"compile": False, "tensor_parallel": 1, "device": "cpu"},
}


def run_export(options: argparse.Namespace) -> Result:
    check_output(options.output, (".onnx",))
    import_extra("onnx", "onnx")
    check_program_file(options)
    with Progress(3) as progress:
        with user_errors(f"load {options.program!r}"):
            program = read_program(options.program)
        progress.begin("export")
        nodes = export_onnx(program, options.output, opset=options.opset, target=options.target)
        progress.begin("compare")
        runtime = options.target if options.target in RUNTIMES else "onnxruntime"
        agreement = _compare(options.output, program, runtime)
    size, before = (Path(path).stat().st_size for path in (options.output, options.program))
    text = (
        f"{options.output}: {size:,} bytes (the program: {before:,}), {nodes} MX nodes; {progress.seconds()}\n"
        f"{runtime} against the program: {agreement}"
    )
    data = {
        "output": options.output,
        "bytes": size,
        "program_bytes": before,
        "mx_nodes": nodes,
        f"{runtime}_against_the_program": agreement,
        "seconds": progress.times(),
    }
    return Result(text, data)


def _compare(path: str, program: ExportedProgram, runtime: str) -> str:
    """Run the file and the program on the example inputs, and describe how their outputs agree."""
    args, kwargs = program.example_inputs
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    try:
        runnable = load(path, runtime)
        feeds = {name: x.numpy() for name, x in zip(runnable.inputs, tensors, strict=True)}
        outputs = [torch.from_numpy(y) for y in runnable.call(feeds).values()]
        with torch.no_grad():
            expected = [y for y in pytree.tree_leaves(program.module()(*args, **kwargs)) if isinstance(y, Tensor)]
        return agreement_of(outputs, expected)
    except Exception as error:  # it is not installed, lacks kernels, or has outputs in another form (complex ones)
        return f"not compared: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


def agreement_of(outputs: list[Tensor], expected: list[Tensor]) -> str:
    """Describe how the outputs of a runtime agree with a program's."""
    floats = [(y.double(), e.double()) for y, e in zip(outputs, expected, strict=True) if e.is_floating_point()]
    largest = max((float((y - e).abs().nan_to_num().max()) for y, e in floats if e.numel()), default=0.0)
    return f"{fidelity([(outputs, expected)])}, largest difference {largest:.1e}"


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


def arrays_by_name(batch: object, names: list[str], file: str) -> dict[str, np.ndarray]:
    """Return the arrays of a batch by the names of the inputs."""
    if isinstance(batch, dict):
        values: dict[Any, Any] = batch
    else:
        items = list(batch) if isinstance(batch, list | tuple) else [batch]
        values = dict(zip(names if len(items) == len(names) else range(len(items)), items, strict=True))
    if set(values) != set(names):
        raise MXError(f"{file}: a batch must hold the inputs {names}, this one holds {list(values)}")
    with user_errors(f"make arrays of {file}"):  # numpy has no bfloat16
        return {name: torch.as_tensor(value).numpy() for name, value in values.items()}
