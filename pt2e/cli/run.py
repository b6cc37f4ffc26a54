"""The command `pt2mx run`: call a package with a batch, and time it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.batches import conform, load_batch
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.output import check_distinct, check_output, deferred_interrupts, whole_file
from pt2mx.pt2e.packages.package import open_package
from pt2mx.pt2e.packages.signature import Signature
from pt2mx.pt2e.provenance import other_version
from pt2mx.pt2e.user_errors import user_errors

#: seconds for which a call is repeated to time it
_SECONDS = 1.0


def run(options: argparse.Namespace) -> Result:
    if options.output is not None:
        check_output(options.output, suffixes=(".pt", ".pth"))
        check_distinct({"--output": options.output}, {"the package": options.package, "--inputs": options.inputs})
    with Progress(2) as progress:
        with user_errors(f"load {options.package!r}"):
            package = open_package(options.package)
        if text := other_version(options.package):
            note(text)
        signature = package.signature
        args, kwargs = signature.args, signature.kwargs
        if options.inputs is not None:
            args, kwargs = _arguments(options.inputs, signature)
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(package.device), (args, kwargs))
        progress.begin("run")
        with user_errors("run the package"), torch.no_grad():
            copies, keywords = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))  # it may write to its inputs
            outputs = package(*copies, **keywords)
            seconds = _time(lambda: package(*args, **kwargs))
        if options.output is not None:
            with user_errors(f"write {options.output!r}"), whole_file(options.output) as file, deferred_interrupts():
                torch.save(pytree.tree_map_only(Tensor, Tensor.cpu, outputs), file)
    inputs = dict(zip(signature.names, pytree.tree_leaves((args, kwargs)), strict=True))
    results = {f"output{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(outputs)[0]}
    lines = [f"{name}: {_describe(leaf)}" for name, leaf in (inputs | results).items()]
    data = {
        "inputs": {name: _as_json(leaf) for name, leaf in inputs.items()},
        "outputs": {name: _as_json(leaf) for name, leaf in results.items()},
        "seconds_a_call": seconds,
        "device": str(package.device),
    }
    return Result("\n".join([*lines, f"{1e3 * seconds:.3f} ms a call on {package.device}"]), data)


def _arguments(inputs: str, signature: Signature) -> tuple[tuple, dict]:
    """Return the arguments of a call with the batch in a file."""
    if not Path(inputs).is_file():
        raise MXError(f"no file {inputs!r}: give a .pt or .npz batch")
    return conform(load_batch(Path(inputs)), signature, inputs, note)


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
