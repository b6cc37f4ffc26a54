"""The command `pt2mx export-onnx`: write an exported program as an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.option_checks import check_program_file
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.onnx.export import export_onnx
from pt2mx.pt2e.onnx.runtime import RUNTIMES, load
from pt2mx.pt2e.output import check_output
from pt2mx.pt2e.program import read_program
from pt2mx.pt2e.report.agreement import describe_agreement
from pt2mx.pt2e.user_errors import user_errors


def run(options: argparse.Namespace) -> Result:
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
        return describe_agreement(outputs, expected)
    except Exception as error:  # it is not installed, lacks kernels, or has outputs in another form (complex ones)
        return f"not compared: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
