"""Load programs of older versions, in which `torch.export.save` left out arguments that had a default in a schema."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch.export import ExportedProgram

from pt2mx.ops.contract import OPERATORS, schema_of

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
_POSITIONAL = 1


def read_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """Load a program as `torch.export.load` does, also one that an older version wrote.

    Args:
        path: of an exported program.

    Returns:
        The program. Its calls of pt2mx's operators have the arguments that older schemas had as defaults.
    """
    with ZipFile(path) as archive:
        graphs = {name: json.loads(archive.read(name)) for name in archive.namelist() if _is_graph(name)}
        short = [node for graph in graphs.values() for node in _calls(graph) if _is_short(node)]
        if not short:
            return torch.export.load(path)
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
            return torch.export.load(copy)


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
