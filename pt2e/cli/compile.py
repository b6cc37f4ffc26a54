"""The command `pt2mx compile`: compile an exported program to a package of machine code."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.analysis.agreement import Fidelity, fidelity
from pt2mx.pt2e.cli.checks import check_compiler, check_device
from pt2mx.pt2e.cli.float_speed import speed_beside_float
from pt2mx.pt2e.cli.programs import load_program_file
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.packages.compile import compile_program
from pt2mx.pt2e.packages.package import Package, check_package_output, open_package
from pt2mx.pt2e.program.provenance import recipe_of


def run(options: argparse.Namespace) -> Result:
    check_device(options.device)
    check_compiler()
    if Path(options.program).is_dir():
        from pt2mx.pt2e.cli.language import compile_folder  # imports transformers

        return compile_folder(options)
    check_package_output(options.output)
    with Progress(3 + options.benchmark) as progress:
        program = load_program_file(options.program)

        progress.begin("compile")
        with user_errors("compile the program"):
            recipe = recipe_of(options.program)
            compile_program(program, options.output, options.device, options.portable, options.unpack, recipe)

        progress.begin("compare")
        speed = None
        with user_errors("run the package"), torch.no_grad():
            package = open_package(options.output)
            agreement = _compare(package, program)
            if options.benchmark:
                progress.begin("benchmark")
                args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(package.device), program.example_inputs)
                speed = speed_beside_float(
                    "package", lambda: package(*args, **kwargs), program, (args, kwargs), package.device
                )
    size, before = (Path(path).stat().st_size for path in (options.output, options.program))
    text = (
        f"compiled against eager: {agreement}\n"
        f"{options.output}: {size / 1e6:.1f} MB (the program: {before / 1e6:.1f} MB); {progress.seconds()}"
    )
    if speed is not None:
        text += f"\n{speed}"
    data = {
        "output": options.output,
        "bytes": size,
        "program_bytes": before,
        "compiled_against_eager": agreement._asdict(),
        "speed": speed and speed.to_dict(),
        "seconds": progress.times(),
    }
    return Result(text, data)


def _compare(package: Package, program: ExportedProgram) -> Fidelity:
    args, kwargs = program.example_inputs
    # copies: a program may write to its inputs
    copies, keywords = pytree.tree_map_only(Tensor, lambda t: t.to(package.device, copy=True), (args, kwargs))
    eager = program.module()(*args, **kwargs)
    return fidelity([(package(*copies, **keywords), eager)])
