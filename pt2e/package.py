"""Packages that AOTInductor compiled: a file that holds machine code, the weights, and how it wants to be called."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.pt2e.dynamic_shapes import Range, input_nodes, ranges
from pt2mx.pt2e.output import check_output

#: where PT2 archives keep the inputs that a program was exported with
_EXAMPLE = "data/sample_inputs/model.pt"
#: what the files of each kind of PT2 archive begin with
_KINDS = {"data/aotinductor/": "package", "models/": "program"}


@dataclass(frozen=True)
class Signature:
    """How a package wants to be called: an example, and of each tensor in it its name and the ranges of its dimensions.

    `args` and `kwargs` may hold trees of tensors; `names` and `ranges` are those of their leaves that are tensors.
    """

    args: tuple
    kwargs: dict
    names: list[str]
    ranges: list[list[Range]]

    @classmethod
    def of(cls, program: ExportedProgram) -> Signature:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), program.example_inputs)
        names = [node.name for node in input_nodes(program) if isinstance(node.meta["val"], Tensor)]
        return cls(args, kwargs, names, ranges(program))

    def conform(self, batch: object) -> tuple[tuple, dict]:
        """The arguments of a call with `batch`: a tensor, a tuple in order or a dict by name; what is no tensor stays
        as in the example.

        Raises:
            MXError: where the tensors are others than the package takes: their number, names, dtypes or shapes.
        """
        named = isinstance(batch, dict) and set(batch) == set(self.names)
        tensors = [batch[name] for name in self.names] if named else pytree.tree_leaves(batch)
        leaves, tree = pytree.tree_flatten((self.args, self.kwargs))
        examples = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) != len(examples) or (isinstance(batch, dict) and not named):
            held = sorted(map(str, batch)) if isinstance(batch, dict) else f"{len(tensors)} values"
            raise MXError(f"a batch must hold the inputs {self.names}, this one holds {held}")
        for given, example, name, extents in zip(tensors, examples, self.names, self.ranges, strict=True):
            _check_tensor(given, example, name, extents)
        tensors = iter(tensors)
        return pytree.tree_unflatten([next(tensors) if isinstance(v, Tensor) else v for v in leaves], tree)


class Package:
    """A loaded package, called as the model that was exported.

    Calls from several threads take turns. AOTInductor keeps Python's global lock while it waits for its runner, and the
    runner would wait for that lock in pt2mx's operators: neither would ever go on.
    """

    def __init__(self, model: Callable, signature: Signature) -> None:
        self.signature = signature
        self.device = torch.device(model.get_metadata()["AOTI_DEVICE_KEY"])
        self._model, self._lock = model, threading.Lock()

    def __call__(self, *args: object, **kwargs: object) -> object:
        with self._lock:
            return self._model(*args, **kwargs)


def check_package_output(path: object) -> None:
    """`MXError` where no package can be written at `path`."""
    check_output(path)
    if not str(path).endswith(".pt2"):
        raise MXError(f"cannot write {str(path)!r}: the name of a package ends in .pt2")


def write_package(program: ExportedProgram, path: object) -> None:
    """Compile a program by AOTInductor into the package `path`, whose name ends in `.pt2`."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    signature, content = Signature.of(program), io.BytesIO()
    torch.save(vars(signature), content)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{_EXAMPLE}", content.getvalue())


def load_package(path: object) -> Package:
    """The package that `pt2mx compile` wrote.

    Raises:
        MXError: where the file is none.
    """
    check_kind(path, "package")
    with zipfile.ZipFile(path) as archive:
        found = [name for name in archive.namelist() if name.endswith(f"/{_EXAMPLE}")]
        if not found:
            raise MXError(f"{str(path)!r} does not say how to call it: load it by torch._inductor.aoti_load_package")
        signature = Signature(**torch.load(io.BytesIO(archive.read(found[0])), weights_only=True))
    return Package(torch._inductor.aoti_load_package(str(path)), signature)


def check_kind(path: object, kind: str) -> None:
    """`MXError` where the file is not a PT2 archive that holds a `"program"` or a `"package"`, as asked."""
    if not Path(path).is_file():
        raise MXError(f"no file {str(path)!r}")
    if not zipfile.is_zipfile(path):
        raise MXError(f"{str(path)!r} is no PT2 archive: {_ADVICE[kind]}")
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    kinds = {k for start, k in _KINDS.items() if any(name.startswith(start) for name in names)}
    if kind not in kinds:
        found = "".join(f", but a {k}" for k in kinds)
        raise MXError(f"{str(path)!r} is no {kind}{found}: {_ADVICE[kind]}")


_ADVICE = {
    "program": "give what `pt2mx quantize` or torch.export.save wrote",
    "package": "give what `pt2mx compile` wrote",
}


def _check_tensor(given: object, example: Tensor, name: str, extents: list[Range]) -> None:
    shape = ", ".join(f"{least}" if least == most else f"{least} to {most or 'any'}" for least, most in extents)
    fits = isinstance(given, Tensor) and given.dtype == example.dtype and given.dim() == example.dim()
    if fits:
        fits = all(
            low <= n and (high is None or n <= high) for n, (low, high) in zip(given.shape, extents, strict=True)
        )
    if not fits:
        kind = f"{tuple(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise MXError(f"the input {name!r} must be of shape ({shape}) and {example.dtype}, not {kind}")
