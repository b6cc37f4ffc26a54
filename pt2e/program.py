"""Exported programs in files."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from pt2mx.errors import MXError
from pt2mx.fx.graph.node import write_out_arguments
from pt2mx.fx.graph.subgraphs import graph_modules
from pt2mx.pt2e.archive import check_kind
from pt2mx.pt2e.origin import Origin, warn_of_other_version
from pt2mx.pt2e.output import check_output, deferred_interrupts, whole_file
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer


def save_program(program: ExportedProgram, path: object, recipe: MXQuantizer | str | None = None) -> None:
    """`torch.export.save`, of a file that says what it is: it holds all arguments of pt2mx's operators, also those that
    are defaults today, the versions of pt2mx and torch, and the recipe, if one is given (`origin_of` reads them). It
    takes the place of `path` when it is whole.

    Args:
        program: `torch.export.export(converted, ...)`. The arguments are written out in its graph.
        recipe: the quantizer, or its YAML.

    Raises:
        MXError: for another object, and where no file can be written at `path`.
    """
    if not isinstance(program, ExportedProgram):
        raise MXError(
            f"expected an ExportedProgram, not {type(program).__name__}: pass torch.export.export(converted, inputs)"
        )
    origin = Origin.here(recipe)
    check_output(path)
    for graph in graph_modules(program.graph_module):
        write_out_arguments(graph)
    with whole_file(path) as file, deferred_interrupts():
        torch.export.save(program, file, extra_files=origin.extra_files())


def load_program(path: object) -> ExportedProgram:
    """`torch.export.load`, with a warning where another version of pt2mx wrote the file.

    torch's loader runs pickles: load only files that you trust.

    Raises:
        MXError: where the file is no exported program.
    """
    check_kind(path, "program")
    warn_of_other_version(path)
    return torch.export.load(path)
