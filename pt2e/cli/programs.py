"""Programs and language models that commands read, and the outputs of a program for its example inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.program.program import read_program
from pt2mx.pt2e.program.provenance import other_version

if TYPE_CHECKING:
    from pt2mx.pt2e.language.language_model import LanguageModel


def load_program_file(path: str) -> ExportedProgram:
    """Load a program, and note which other version of pt2mx wrote it."""
    note_other_version(path)
    return read_program(path)


def note_other_version(path: str) -> None:
    """Note which other version of pt2mx wrote a program or a package."""
    if text := other_version(path):
        note(text)


def load_folder(path: str, device: str | None = None) -> LanguageModel:
    """Load the language model of a folder; by default on the device of its export."""
    from pt2mx.pt2e.language.language_model import LanguageModel  # imports transformers

    with user_errors(f"load {path!r}"):
        return LanguageModel.from_pretrained(path, device)


@torch.no_grad()
def example_call(program: ExportedProgram) -> tuple[list[object], list[object]]:
    """Return the leaves of a program's example inputs, and those of its outputs for them."""
    args, kwargs = program.example_inputs
    # a program may write to its inputs
    copies, keywords = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
    return pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(program.module()(*copies, **keywords))
