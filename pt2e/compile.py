"""The commands `pt2mx compile` and `pt2mx run`: an exported program becomes a package of machine code, which runs."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.lower import lower_to_inductor
from pt2mx.fx.portable import without_calls
from pt2mx.pt2e.agreement import agreement
from pt2mx.pt2e.dynamic_shapes import dynamic_shapes
from pt2mx.pt2e.models import load_batch
from pt2mx.pt2e.output import check_output
from pt2mx.pt2e.package import check_kind, check_package_output, load_package, write_package
from pt2mx.pt2e.stage import progress_bar, stage, step

#: seconds for which `pt2mx run` repeats a call to time it
_SECONDS = 1.0


def add_commands(commands: argparse._SubParsersAction) -> None:
    compiling = commands.add_parser("compile", help="compile an exported program by AOTInductor")
    compiling.add_argument("program", help="what `pt2mx quantize` or torch.export.save wrote")
    compiling.add_argument("--output", required=True, help="the package to write; its name ends in .pt2")
    compiling.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it runs (default: cpu)")
    compiling.add_argument("--portable", action="store_true", help="a package that runs where pt2mx is not installed")
    compiling.add_argument("--unpack", action="store_true", help="keep weights dequantized: larger, mostly faster")
    compiling.set_defaults(run=_compile)
    running = commands.add_parser("run", help="run a package that `pt2mx compile` wrote")
    running.add_argument("package", help="what `pt2mx compile` wrote")
    running.add_argument("--inputs", help="a .pt or .npz batch; by default what the program was exported with")
    running.add_argument("--output", help="file to write the outputs to, by torch.save")
    running.set_defaults(run=_run)


def compile_program(
    program: ExportedProgram, path: object, device: str = "cpu", portable: bool = False, unpack: bool = False
) -> None:
    """Lower a converted program and compile it by AOTInductor into the package `path`.

    It takes the shapes that the program takes. What it computes with the same operations it gives to the bit:
    quantization, products in an eager kernel. What Inductor computes in another way or order (sums, `exp`, `tanh`)
    differs in the last bits, and a quantization behind that may step to the next value.

    Args:
        program: `torch.export.export(converted, ...)`, with its example inputs; it stays as it is.
        path: a name that ends in `.pt2`.
        portable: write pt2mx's operators out, so that the package runs in a process without pt2mx. A weight is then
            dequantized at each call. Otherwise a process imports pt2mx before it loads the package.
        unpack: keep weights dequantized in the package, as `lower_to_inductor` does; otherwise they stay packed.

    Raises:
        MXError: where nothing is quantized in the program, or no package can be written at `path`.
    """
    check_package_output(path)
    lowered = lower_to_inductor(program.module(), device, unpack=unpack)
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device), program.example_inputs)
    with torch.no_grad(), warnings.catch_warnings():
        # torch, of its own code
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        lowered = torch.export.export(lowered, args, kwargs, dynamic_shapes=dynamic_shapes(program))
        write_package(without_calls(lowered) if portable else lowered, path)


def _compile(options: argparse.Namespace) -> None:
    check_package_output(options.output)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise MXError("--device cuda needs an NVIDIA GPU and a torch that is built for it: leave it out for the CPU")
    check_kind(options.program, "program")
    with progress_bar(3) as progress:
        with stage(f"load {options.program!r}"):
            program = torch.export.load(options.program)
        if program.example_inputs is None:
            raise MXError(f"{options.program!r} holds no example inputs: export it again and save it whole")

        step(progress, "compile")
        begin = time.perf_counter()
        with stage("compile the program"):
            compile_program(program, options.output, options.device, options.portable, options.unpack)
        seconds = time.perf_counter() - begin

        step(progress, "compare")
        with stage("run the package"), torch.no_grad():
            args, kwargs = program.example_inputs
            package = load_package(options.output)
            eager = program.module()(*args, **kwargs)
            sqnr, cosine = agreement([(_call(package, args, kwargs), eager)])
        progress.update()
    print(f"compiled against eager: SQNR {sqnr:.1f} dB, cosine {cosine:.6f}")
    sizes = [Path(path).stat().st_size / 1e6 for path in (options.output, options.program)]
    print(f"{options.output}: {sizes[0]:.1f} MB (the program: {sizes[1]:.1f} MB), {seconds:.0f} s")


def _run(options: argparse.Namespace) -> None:
    if options.output is not None:
        check_output(options.output)
    with stage(f"load {options.package!r}"):
        package = load_package(options.package)
    signature = package.signature
    args, kwargs = signature.args, signature.kwargs
    if options.inputs is not None:
        if not Path(options.inputs).is_file():
            raise MXError(f"no file {options.inputs!r}: give a .pt or .npz batch")
        args, kwargs = signature.conform(load_batch(Path(options.inputs)))
    with stage("run the package"), torch.no_grad():
        outputs = _call(package, args, kwargs)
        seconds = _time(lambda: _call(package, args, kwargs))
    if options.output is not None:
        with stage(f"write {options.output!r}"):
            torch.save(pytree.tree_map_only(Tensor, Tensor.cpu, outputs), options.output)
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    for name, tensor in zip(signature.names, inputs, strict=True):
        print(f"{name}: {_describe(tensor)}")
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        print(f"output{pytree.keystr(path)}: {_describe(leaf)}")
    print(f"{1e3 * seconds:.3f} ms a call on {package.device}")


def _call(package: object, args: tuple, kwargs: dict) -> object:
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(package.device), (args, kwargs))
    return package(*args, **kwargs)


def _time(call: Callable[[], object]) -> float:
    """Median seconds of a call, the device's work included."""
    times = []
    while not times or sum(times) < _SECONDS:
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _describe(leaf: object) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)
