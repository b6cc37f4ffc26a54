"""The command `pt2mx export-onnx`: an exported program becomes an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.extras import import_extra
from pt2mx.pt2e.archive import check_kind
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.onnx.export import export_onnx
from pt2mx.pt2e.origin import other_version
from pt2mx.pt2e.output import check_distinct, check_output
from pt2mx.pt2e.report.agreement import fidelity
from pt2mx.pt2e.user_errors import user_errors


def run(options: argparse.Namespace) -> Result:
    check_output(options.output, (".onnx",))
    check_distinct({"--output": options.output}, {"the program": options.program})
    import_extra("onnx", "onnx")
    check_kind(options.program, "program")
    if text := other_version(options.program):
        note(text)
    with Progress(3) as progress:
        with user_errors(f"load {options.program!r}"):
            program = torch.export.load(options.program)
        progress.begin("export")
        nodes = export_onnx(program, options.output, opset=options.opset, target=options.target)
        progress.begin("compare")
        found = _compared(options.output, program)
    size, before = (Path(path).stat().st_size for path in (options.output, options.program))
    text = (
        f"{options.output}: {size:,} bytes (the program: {before:,}), {nodes} MX nodes; {progress.seconds()}\n"
        f"onnxruntime against the program: {found}"
    )
    data = {
        "output": options.output,
        "bytes": size,
        "program_bytes": before,
        "mx_nodes": nodes,
        "onnxruntime_against_the_program": found,
        "seconds": progress.times(),
    }
    return Result(text, data)


def _compared(path: str, program: ExportedProgram) -> str:
    """The agreement of the outputs for the example inputs, in words."""
    args, kwargs = program.example_inputs
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    try:
        runtime = import_extra("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised too
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        feeds = {value.name: x.numpy() for value, x in zip(session.get_inputs(), tensors, strict=True)}
        got = [torch.from_numpy(y) for y in session.run(None, feeds)]
        with torch.no_grad():
            want = [y for y in pytree.tree_leaves(program.module()(*args, **kwargs)) if isinstance(y, Tensor)]
        floats = [(g.double(), w.double()) for g, w in zip(got, want, strict=True) if w.is_floating_point()]
        largest = max((float((g - w).abs().nan_to_num().max()) for g, w in floats if w.numel()), default=0.0)
        found = fidelity([(got, want)])
    except Exception as error:  # it is not installed, lacks kernels, or has outputs in another form (complex ones)
        return f"not compared: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return f"{found}, largest difference {largest:.1e}"
