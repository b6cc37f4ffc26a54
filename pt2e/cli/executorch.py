"""`pt2mx export-executorch`: write an exported program as an ExecuTorch file."""

from __future__ import annotations

import argparse
import os
from collections import Counter

from torch import Tensor
from torch.export import ExportedProgram

from pt2mx.analysis.agreement import describe_agreement
from pt2mx.pt2e.cli.programs import example_call, load_program_file
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.executorch.export import export_executorch, import_executorch
from pt2mx.pt2e.files.user_errors import user_errors


def run(options: argparse.Namespace) -> Result:
    import_executorch("executorch.exir")
    with Progress(3) as progress:
        program = load_program_file(options.program)
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
    with user_errors("run the file"):
        inputs, expected = example_call(program)
        method = import_executorch("executorch.runtime").Runtime.get().load_program(path).load_method("forward")
        pairs = zip(method.execute(inputs), expected, strict=True)
        tensors = [(y, e) for y, e in pairs if isinstance(e, Tensor)]
    return describe_agreement([y for y, _ in tensors], [e for _, e in tensors])
