"""Packages that AOTInductor compiled: files that contain machine code, the weights and the input signature."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch._inductor.package import package_aoti
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.patches.exact_lengths import exact_lengths
from pt2mx.pt2e.files.archive import add_records, check_kind, read_record, record_names
from pt2mx.pt2e.files.output import check_output, deferred_interrupts, whole_file
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.packages.probe import min_sizes
from pt2mx.pt2e.packages.signature import Signature
from pt2mx.pt2e.program.program import check_operators
from pt2mx.pt2e.program.provenance import Provenance, warn_of_other_version
from pt2mx.pt2e.program.sizes import Range, every_symbol, symbols

#: the record of a PT2 archive for the example inputs of an export; packages of language models have none
EXAMPLE = "data/sample_inputs/model.pt"
#: folder of AOTInductor's records in a package
CODE = "data/aotinductor/"
_LOAD = "import sys, torch, pt2mx; torch._inductor.aoti_load_package(sys.argv[1])"


class CompiledModel(Protocol):
    """The machine code that `torch._inductor.aoti_load_package` loads."""

    def __call__(self, *args: object, **kwargs: object) -> Any: ...

    def get_metadata(self) -> dict[str, str]: ...


class Package:
    """A loaded package, as `load_package` returns it.

    Calls from several threads run one after the other, because two at once could deadlock: AOTInductor waits for its
    runner while it has Python's global lock, and the runner waits for that lock in pt2mx's operators.

    Args:
        model: the machine code, which checks nothing.
        signature: the input signature that each call's arguments are compared with. It is an attribute; so is `device`,
            on which the package runs.
    """

    def __init__(self, model: CompiledModel, signature: Signature) -> None:
        self.signature = signature
        self.device = torch.device(model.get_metadata()["AOTI_DEVICE_KEY"])
        if self.device.type == "cuda" and self.device.index is None:  # where it was loaded
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._model, self._lock = model, threading.Lock()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model as the one that was exported runs.

        Raises:
            MXError: for arguments that the program does not take; it names the input.
        """
        args, kwargs = self.signature.checked(args, kwargs, self.device)
        with self._lock:
            outputs = self._model(*args, **kwargs)
        return self.signature.returned(outputs)


def check_package_output(path: str | os.PathLike[str]) -> None:
    """Raise an error for a path to which no package can be written."""
    check_output(path)
    if not str(path).endswith(".pt2"):
        raise MXError(f"cannot write {str(path)!r}: the name of a package ends in .pt2")


def write_package(
    code: ExportedProgram,
    program: ExportedProgram,
    module: GraphModule,
    path: str | os.PathLike[str],
    device: torch.device | str,
    stated: list[list[Range] | None],
    eager: Callable,
    provenance: Provenance,
) -> None:
    """Compile a program with AOTInductor into the package `path`, whose name ends in `.pt2`.

    Args:
        code: the program to compile: `program`, possibly decomposed further.
        program: an export of `module`, with example inputs on the package's device.
        module, path, device, provenance: the graph module; the package, where it runs, and what it records.
        stated: the ranges of the inputs.
        eager: the model whose outputs the package must reproduce, called with inputs on that device. It raises an error
            for inputs that the program rejects, which code on a GPU may not.
    """
    args, kwargs = code.example_inputs
    with exact_lengths():
        files = torch._inductor.aot_compile(
            code.module(check_guards=False), args, kwargs, options={"aot_inductor.package": True}
        )
    if isinstance(files, str | GraphModule):  # without that option
        raise TypeError(f"AOTInductor gave {type(files).__name__}, not the files of a package")
    with whole_file(path) as file:
        with deferred_interrupts():
            package_aoti(file, files)
        check_loads(file.name, torch.device(device))
        signature = Signature.of(program, module)
        if every_symbol(program):
            any_size = Signature.of(program, module, dict.fromkeys(symbols(program), 0))
            compiled = Package(torch._inductor.aoti_load_package(file.name), any_size)
            lower, conditions = min_sizes(program, stated, eager, compiled)
            signature = Signature.of(program, module, lower, conditions)
        content = io.BytesIO()
        torch.save({field.name: getattr(signature, field.name) for field in fields(signature)}, content)
        add_records(file.name, {EXAMPLE: content.getvalue(), **provenance.records()})


def load_package(path: str | os.PathLike[str]) -> Package:
    """Load a package that `pt2mx compile` wrote, with a warning where another version of pt2mx wrote it.

    Packages are machine code: load only those that you trust.

    Args:
        path: the path of the package.

    Returns:
        A callable with the arguments and outputs of the exported model. It raises an MXError for arguments of another
        number, nesting, dtype, shape or device than the program takes. Its `device` is where it runs.

    Raises:
        MXError: where the file is no package, a damaged one, or one without a signature; for operators that it calls
            and that nothing defines in this process.

    Example:
        >>> import tempfile, torch, pt2mx
        >>> program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.export.save(program, f"{folder}/net.pt2")  # `pt2mx compile` makes a package of it
        ...     package = pt2mx.load_package(f"{folder}/net.pt2")
        Traceback (most recent call last):
        ...
        pt2mx.errors.MXError: '...net.pt2' is no package, but a program: give what `pt2mx compile` wrote
    """
    package = open_package(path)
    warn_of_other_version(path)
    return package


def open_package(path: str | os.PathLike[str]) -> Package:
    """Load a package as `load_package` does, without the warning."""
    signature = read_signature(path)
    with user_errors(f"read the package {str(path)!r}", "compile its program again"):
        check_operators(path, [call["target"].replace("::", ".") for call in calls_in(path)])
    return Package(torch._inductor.aoti_load_package(str(path)), signature)


def calls_in(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the calls of operators that the machine code of a package makes through Python, as AOTInductor records
    them: `target` is `namespace::name`."""
    names = [name for name in record_names(path) if name.startswith(CODE) and name.endswith(".wrapper.json")]
    records = [json.loads(read_record(path, name) or b"{}") for name in names]
    return [node["node"] for record in records for node in record.get("nodes", [])]


def read_signature(path: str | os.PathLike[str]) -> Signature:
    """Read the input signature of a package, without loading its machine code."""
    check_kind(path, "package")
    content = read_record(path, EXAMPLE)
    if content is None:
        raise MXError(f"{str(path)!r} does not say how to call it: load it by torch._inductor.aoti_load_package")
    try:
        return Signature(**torch.load(io.BytesIO(content), weights_only=True))
    except TypeError:
        raise MXError(f"{str(path)!r} is of another version of pt2mx: compile its program again") from None


def check_loads(path: str, device: torch.device) -> None:
    """Load a package in a child process.

    Packages for a CPU are not loaded: none was seen to crash, and a child process takes seconds.
    """
    if device.type == "cpu":
        return
    child = subprocess.run([sys.executable, "-c", _LOAD, path], capture_output=True, encoding="utf-8", errors="replace")
    if child.returncode < 0:
        raise MXError(
            f"the machine code for {device} crashes while torch {torch.__version__} loads it (signal "
            f"{-child.returncode}), as any package does if the C++ compiler links libstdc++ statically: set "
            "CXX to one that links it dynamically, or use torch.compile"
        )
    if child.returncode:
        raise MXError(f"the machine code for {device} cannot be loaded: {child.stderr.strip().splitlines()[-1]}")
