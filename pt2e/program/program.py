"""Export, save and load programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import nn
from torch.export import ExportedProgram

from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import is_ours, specs_of, write_out_arguments
from pt2mx.ops.contract import OPERATORS, schema_of
from pt2mx.patches.program_schema import schema_read_once, without_canonical_form
from pt2mx.pt2e.files.archive import check_kind
from pt2mx.pt2e.files.output import check_output, deferred_interrupts, whole_file
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.program.provenance import Provenance, warn_of_other_version
from pt2mx.pt2e.program.sizes import record_dim_names
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer


def save_program(
    program: ExportedProgram, path: str | os.PathLike[str], recipe: MXQuantizer | str | None = None
) -> None:
    """Save a program like `torch.export.save`, with its provenance, the names of its dynamic dimensions, and all
    arguments of pt2mx's operators.

    `provenance_of` reads the versions of pt2mx and torch, and the recipe, from the file. The file replaces `path` once
    it is complete. Threads take turns.

    Args:
        program: `torch.export.export(converted, ...)`. Its graph gets the written arguments, and the names.
        path: the file; by convention its name ends in .pt2.
        recipe: the quantizer that prepared the model, or its YAML.

    Raises:
        MXError: for another object, and where no file can be written at `path`.

    Example:
        >>> import tempfile, torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp8")
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pt2mx.save_program(torch.export.export(converted, (x,)), f"{folder}/net.pt2", quantizer)
        ...     loaded = pt2mx.load_program(f"{folder}/net.pt2").module()
        >>> torch.equal(loaded(x), converted(x))
        True
    """
    if not isinstance(program, ExportedProgram):
        raise MXError(
            f"expected an ExportedProgram, not {type(program).__name__}: pass torch.export.export(converted, inputs)"
        )
    provenance = Provenance.here(recipe)
    check_output(path)
    for graph in graph_modules(program.graph_module):
        write_out_arguments(graph)
    record_dim_names(program)
    with without_canonical_form(), whole_file(path) as file, deferred_interrupts():
        torch.export.save(program, file, extra_files=provenance.extra_files())


def load_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """Load a program like `torch.export.load`, and warn where another version of pt2mx wrote the file.

    torch's loader runs pickles: load only files that you trust.

    Args:
        path: a file that `save_program`, `pt2mx quantize` or `torch.export.save` wrote.

    Returns:
        The program; its `module()` can be called, compiled and lowered.

    Raises:
        MXError: where the file is no exported program, is damaged, or this torch does not load it; for an element or a
            scale mode that this process registers first (`register_element`).

    Example:
        >>> import tempfile, torch, pt2mx
        >>> program = torch.export.export(torch.nn.Linear(64, 8), (torch.ones(1, 64),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.export.save(program, f"{folder}/net.pt2")
        ...     loaded = pt2mx.load_program(f"{folder}/net.pt2")
        >>> sorted(loaded.state_dict)
        ['bias', 'weight']
    """
    check_kind(path, "program")
    warn_of_other_version(path)
    return read_program(path)


#: argument -> the default that it had in older schemas, as torch writes it; all others had None
_DEFAULTS: dict[str, dict[str, object]] = {
    "axis": {"as_int": -1},
    "block_dim": {"as_int": -1},
    "block_size": {"as_int": 32},
    "scale_mode": {"as_string": "floor"},
    "rounding": {"as_string": "even"},
    "ste": {"as_string": "identity"},
    "activation": {"as_string": "none"},
    "rotation": {"as_int": 0},
    "stride": {"as_ints": [1, 1]},
    "dilation": {"as_ints": [1, 1]},
    "padding": {"as_ints": [0, 0]},
    "is_causal": {"as_bool": False},
}
_OPERATOR = "torch.ops.pt2mx."
#: the target of a node in the JSON of a graph: namespace.name
_TARGET = re.compile(rb'"target": "torch\.ops\.(\w+\.\w+)')
_POSITIONAL = 1


def read_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """Load a program as `torch.export.load` does, also one that an older version wrote.

    Args:
        path: of an exported program.

    Returns:
        The program. Its calls of pt2mx's operators have the arguments that older schemas had as defaults.

    Raises:
        MXError: for a file that is damaged, or that this torch does not load.
    """
    with user_errors(f"load {str(path)!r}"), ZipFile(path) as archive:
        texts = {name: archive.read(name) for name in archive.namelist() if _is_graph(name)}
        check_operators(path, (name.decode() for text in texts.values() for name in _TARGET.findall(text)))
        graphs = {name: json.loads(text) for name, text in texts.items()}
        short = [node for graph in graphs.values() for node in _calls(graph) if _is_short(node)]
        if not short:
            return _load(path, path)
        for node in short:
            _write_out(node)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "program.pt2")
            with ZipFile(copy, "w") as upgraded:
                for name in archive.namelist():
                    if name in graphs:
                        upgraded.writestr(name, json.dumps(graphs[name]))
                    else:
                        with archive.open(name) as record, upgraded.open(name, "w", force_zip64=True) as written:
                            shutil.copyfileobj(record, written)
            return _load(copy, path)


def _load(file: str | os.PathLike[str], path: object) -> ExportedProgram:
    """Load a file that holds the program of `path`. Raise an MXError for an element or a scale mode that it names and
    that nothing registered in this process."""
    with schema_read_once():
        program = torch.export.load(file)
    try:
        for graph in graph_modules(program.graph_module):
            for node in filter(is_ours, graph.graph.nodes):
                specs_of(node)
    except MXError as error:
        raise MXError(f"{str(path)!r}: {error}") from None
    return program


def check_operators(path: object, called: Iterable[str]) -> None:
    """Raise an MXError for a file that calls operators, `namespace.name`, which are not defined in this process."""
    for operator in sorted(set(called)):
        namespace, name, *_ = operator.split(".")
        if not hasattr(getattr(torch.ops, namespace), name):
            raise MXError(
                f"{str(path)!r} calls the operator {namespace}::{name}, which nothing defines here: import the module "
                "that does; on the command line, --import FILE.py"
            )


def _is_graph(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 3 and parts[1] == "models" and name.endswith(".json")


def _calls(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the nodes that call pt2mx's operators, in subgraphs too."""
    if isinstance(value, dict):
        if isinstance(value.get("target"), str) and value["target"].startswith(_OPERATOR):
            yield value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from _calls(part)


def _arguments(node: dict[str, Any]) -> list[torch.Argument]:
    name = node["target"].removeprefix(_OPERATOR).removesuffix(".default")
    return schema_of(name).arguments if name in OPERATORS else []


def _is_short(node: dict[str, Any]) -> bool:
    written = {entry["name"] for entry in node["inputs"]}
    return any(not a.has_default_value() and a.name not in written for a in _arguments(node))


def _write_out(node: dict[str, Any]) -> None:
    written = {entry["name"]: entry for entry in node["inputs"]}
    node["inputs"] = [
        written.get(a.name) or {"name": a.name, "arg": _DEFAULTS.get(a.name, {"as_none": True}), "kind": _POSITIONAL}
        for a in _arguments(node)
    ]


def export_program(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """Return `torch.export.export` of a module, without gradients."""
    with torch.no_grad():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        for graph in graph_modules(program.graph_module):
            graph._tracer_cls = graph.graph._tracer_cls = None  # unpickling could not make export's tracer again
    return program
