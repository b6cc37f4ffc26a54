"""The command `pt2mx run`: call a package, or an ONNX file, with a batch, and time it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.float_speed import speed_beside_float
from pt2mx.pt2e.cli.inputs import arrays_by_name, conform
from pt2mx.pt2e.cli.programs import load_program_file, note_other_version
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.output import deferred_interrupts, whole_file
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.input_files import load_batch
from pt2mx.pt2e.onnx.runtime import load
from pt2mx.pt2e.packages.package import open_package
from pt2mx.pt2e.report.speed import Speed

#: seconds for which a call is repeated to time it
_SECONDS = 1.0


def run(options: argparse.Namespace) -> Result:
    if Path(options.package).suffix == ".onnx":
        return _run_onnx(options)
    with Progress(2 + options.benchmark) as progress:
        with user_errors(f"load {options.package!r}"):
            package = open_package(options.package)
        note_other_version(options.package)
        signature = package.signature
        args, kwargs = signature.args, signature.kwargs
        if options.inputs is not None:
            args, kwargs = conform(_load(options.inputs), signature, options.inputs, note)
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(package.device), (args, kwargs))
        progress.begin("run")
        with user_errors("run the package"), torch.no_grad():
            copies, keywords = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))  # it may write to its inputs
            outputs = package(*copies, **keywords)
            timed: float | Speed
            if options.benchmark:
                progress.begin("benchmark")
                program = _float_program(options)
                timed = speed_beside_float(
                    options.package, lambda: package(*args, **kwargs), program, (args, kwargs), package.device
                )
            else:
                timed = _time(lambda: package(*args, **kwargs))
        _save(outputs, options.output)
    inputs = dict(zip(signature.names, pytree.tree_leaves((args, kwargs)), strict=True))
    results = {f"output{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(outputs)[0]}
    return _result(inputs, results, timed, str(package.device))


def _float_program(options: argparse.Namespace) -> ExportedProgram | None:
    if options.float is None:
        note(f"{options.package} does not hold its float model: --float PROGRAM, what was compiled, times it beside")
        return None
    return load_program_file(options.float)


def _run_onnx(options: argparse.Namespace) -> Result:
    with Progress(2) as progress:
        model = load(options.package, options.runtime)
        inputs = arrays_by_name(_load(options.inputs), model.inputs, options.inputs)
        progress.begin("run")
        with user_errors(f"run {options.package!r} in {model.runtime}"):
            outputs = {name: torch.from_numpy(y) for name, y in model.call(inputs).items()}
            seconds = _time(lambda: model.call(inputs))
        _save(outputs, options.output)
    return _result({n: torch.from_numpy(x) for n, x in inputs.items()}, outputs, seconds, f"cpu in {model.runtime}")


def _save(outputs: object, path: str | None) -> None:
    if path is not None:
        with user_errors(f"write {path!r}"), whole_file(path) as file, deferred_interrupts():
            torch.save(pytree.tree_map_only(Tensor, Tensor.cpu, outputs), file)


def _result(inputs: dict[str, Any], outputs: dict[str, Any], timed: float | Speed, device: str) -> Result:
    lines = [f"{name}: {_describe(leaf)}" for name, leaf in (inputs | outputs).items()]
    data: dict[str, Any] = {
        "inputs": {name: _as_json(leaf) for name, leaf in inputs.items()},
        "outputs": {name: _as_json(leaf) for name, leaf in outputs.items()},
        "device": device,
    }
    if isinstance(timed, Speed):
        lines.append(str(timed))
        data["speed"] = timed.to_dict()
    else:
        lines.append(f"{1e3 * timed:.3f} ms a call on {device}")
        data["seconds_a_call"] = timed
    return Result("\n".join(lines), data)


def _load(inputs: str) -> object:
    if not Path(inputs).is_file():
        raise MXError(f"no file {inputs!r}: give a .pt or .npz batch")
    return load_batch(Path(inputs))


def _time(call: Callable[[], object]) -> float:
    """Return the median seconds of a call, including the work of the device."""
    times: list[float] = []
    while not times or sum(times) < _SECONDS:
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _describe(leaf: object) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)


def _as_json(leaf: object) -> object:
    """Return the shape and dtype of a tensor, and the `repr` of any other value."""
    if isinstance(leaf, Tensor):
        return {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
    return repr(leaf)
