"""Packages that AOTInductor compiled: a file that holds machine code, the weights, and how it wants to be called."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import fields

import torch
from torch._inductor.package import package_aoti
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.pt2e.archive import add_records, check_kind, read_record
from pt2mx.pt2e.origin import Origin, warn_of_other_version
from pt2mx.pt2e.output import check_output, deferred_interrupts, whole_file
from pt2mx.pt2e.packages.extents import Range, symbols
from pt2mx.pt2e.packages.least_extents import least_extents
from pt2mx.pt2e.packages.signature import Signature

#: where PT2 archives keep the inputs that a program was exported with
_EXAMPLE = "data/sample_inputs/model.pt"


class Package:
    """A loaded package, called as the model that was exported.

    Calls from several threads take turns. AOTInductor keeps Python's global lock while it waits for its runner, and the
    runner would wait for that lock in pt2mx's operators: neither would ever go on.

    Machine code checks nothing: each call holds its arguments against the signature, and raises an `MXError` for others
    than the program takes.
    """

    def __init__(self, model: Callable, signature: Signature) -> None:
        self.signature = signature
        self.device = torch.device(model.get_metadata()["AOTI_DEVICE_KEY"])
        if self.device.type == "cuda" and self.device.index is None:  # where it was loaded
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._model, self._lock = model, threading.Lock()

    def __call__(self, *args: object, **kwargs: object) -> object:
        args, kwargs = self.signature.checked(args, kwargs, self.device)
        with self._lock:
            outputs = self._model(*args, **kwargs)
        return self.signature.returned(outputs)


def check_package_output(path: object) -> None:
    """`MXError` where no package can be written at `path`."""
    check_output(path)
    if not str(path).endswith(".pt2"):
        raise MXError(f"cannot write {str(path)!r}: the name of a package ends in .pt2")


def write_package(
    code: ExportedProgram,
    program: ExportedProgram,
    module: GraphModule,
    path: object,
    stated: list[list[Range] | None],
    eager: Callable,
    origin: Origin,
) -> None:
    """Compile a program by AOTInductor into the package `path`, whose name ends in `.pt2`.

    Args:
        code: what is compiled: `program`, maybe decomposed further.
        program: an export of `module`, with example inputs on the package's device.
        stated: the ranges of the inputs.
        eager: the model that the package is to agree with, called with inputs on that device.
    """
    args, kwargs = code.example_inputs
    files = torch._inductor.aot_compile(
        code.module(check_guards=False), args, kwargs, options={"aot_inductor.package": True}
    )
    with whole_file(path) as file:
        with deferred_interrupts():
            package_aoti(file, files)
        least, conditions = {}, []
        if dynamic := symbols(program):
            any_extent = Signature.of(program, module, dict.fromkeys(dynamic, 0))
            compiled = Package(torch._inductor.aoti_load_package(file.name), any_extent)
            least, conditions = least_extents(program, stated, eager, compiled)
        signature, content = Signature.of(program, module, least, conditions), io.BytesIO()
        torch.save({field.name: getattr(signature, field.name) for field in fields(signature)}, content)
        add_records(file.name, {_EXAMPLE: content.getvalue(), **origin.records()})


def load_package(path: object) -> Package:
    """The package that `pt2mx compile` wrote; with a warning where another version of pt2mx did.

    Packages are machine code: load only those that you trust.

    Raises:
        MXError: where the file is none.
    """
    package = open_package(path)
    warn_of_other_version(path)
    return package


def open_package(path: object) -> Package:
    """`load_package`, without the warning."""
    check_kind(path, "package")
    content = read_record(path, _EXAMPLE)
    if content is None:
        raise MXError(f"{str(path)!r} does not say how to call it: load it by torch._inductor.aoti_load_package")
    try:
        signature = Signature(**torch.load(io.BytesIO(content), weights_only=True))
    except TypeError:
        raise MXError(f"{str(path)!r} is of another version of pt2mx: compile its program again") from None
    return Package(torch._inductor.aoti_load_package(str(path)), signature)
