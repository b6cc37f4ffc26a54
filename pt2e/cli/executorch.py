"""`pt2mx export-executorch`: write an exported program as an ExecuTorch file."""

from __future__ import annotations

import argparse
import os
from collections import Counter

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.analysis.agreement import describe_agreement
from pt2mx.pt2e.cli.option_checks import check_program_file
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.executorch.export import export_executorch, import_executorch
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.program.program import read_program


def run(options: argparse.Namespace) -> Result:
    check_program_file(options)
    import_executorch("executorch.exir")
    with Progress(3) as progress:
        with user_errors(f"load {options.program!r}"):
            program = read_program(options.program)
        progress.begin("export")
        file = export_executorch(program, options.output, backend=options.backend, max_size=options.max_size)
        progress.begin("compare")
        agreement = _compare(options.output, program)
    before, parts = os.path.getsize(options.program), Counter(file.backends)
    delegated = "".join(f", {count} parts by {name}" for name, count in parts.items())
    text = (
        f"{options.output}: {file.size:,} bytes (the program: {before:,}), {len(file.operators)} operators by portable "
        f"kernels{delegated}; {progress.seconds()}\nExecuTorch against the program: {agreement}"
    )
    data = {
        "output": options.output,
        "bytes": file.size,
        "program_bytes": before,
        "operators": file.operators,
        "backends": dict(parts),
        "executorch_against_the_program": agreement,
        "seconds": progress.times(),
    }
    return Result(text, data)


def _compare(path: str, program: ExportedProgram) -> str:
    """Run the file and the program on the example inputs, and describe how their outputs agree."""
    args, kwargs = program.example_inputs
    with user_errors("run the file"), torch.no_grad():
        method = import_executorch("executorch.runtime").Runtime.get().load_program(path).load_method("forward")
        outputs = method.execute(pytree.tree_leaves((args, kwargs)))
        expected = pytree.tree_leaves(program.module()(*args, **kwargs))
    pairs = [(y, e) for y, e in zip(outputs, expected, strict=True) if isinstance(e, Tensor)]
    return describe_agreement([y for y, _ in pairs], [e for _, e in pairs])
