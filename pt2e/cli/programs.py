"""Programs that commands read: load one, and compute its outputs for its example inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.program.program import read_program
from pt2mx.pt2e.program.provenance import other_version


def load_program_file(path: str) -> ExportedProgram:
    """Load a program, and note which other version of pt2mx wrote it."""
    note_other_version(path)
    return read_program(path)


def note_other_version(path: str) -> None:
    """Note which other version of pt2mx wrote a program or a package."""
    if text := other_version(path):
        note(text)


@torch.no_grad()
def example_call(program: ExportedProgram) -> tuple[list[object], list[object]]:
    """Return the leaves of a program's example inputs, and those of its outputs for them."""
    args, kwargs = program.example_inputs
    # a program may write to its inputs
    copies, keywords = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
    return pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(program.module()(*copies, **keywords))
