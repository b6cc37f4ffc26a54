"""Save and load exported programs."""

from __future__ import annotations

import os

import torch
from torch.export import ExportedProgram

from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import write_out_arguments
from pt2mx.pt2e.archive import check_kind
from pt2mx.pt2e.old_programs import read_program
from pt2mx.pt2e.output import check_output, deferred_interrupts, whole_file
from pt2mx.pt2e.provenance import Provenance, warn_of_other_version
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer


def save_program(
    program: ExportedProgram, path: str | os.PathLike[str], recipe: MXQuantizer | str | None = None
) -> None:
    """Save a program like `torch.export.save`, with its provenance and with all arguments of pt2mx's operators.

    `provenance_of` reads the versions of pt2mx and torch, and the recipe, from the file. The file replaces `path` once
    it is complete.
    Args:
        program: `torch.export.export(converted, ...)`. The arguments are written out in its graph.
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
    with whole_file(path) as file, deferred_interrupts():
        torch.export.save(program, file, extra_files=provenance.extra_files())


def load_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """Load a program like `torch.export.load`, and warn where another version of pt2mx wrote the file.

    torch's loader runs pickles: load only files that you trust.

    Args:
        path: a file that `save_program`, `pt2mx quantize` or `torch.export.save` wrote.

    Returns:
        The program; its `module()` can be called, compiled and lowered.

    Raises:
        MXError: where the file is no exported program.

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
