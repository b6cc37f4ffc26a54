"""The encoder of a language model: a second program, whose outputs the decoder reads, such as a vision tower."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.pt2e.language.positions import positions_of
from pt2mx.pt2e.language.runtime import lower_program
from pt2mx.pt2e.language.signature import example_inputs


class Encoder(nn.Module):
    """Runs the program of an encoder, in eager mode or compiled.

    Args:
        program: the program, quantized or float, with named inputs.
        device: the device to run on.
    """

    def __init__(self, program: ExportedProgram, device: torch.device) -> None:
        super().__init__()
        self.program, self.device = program, device

    @cached_property
    def lowered(self) -> GraphModule:
        """The lowered program. The first access lowers it."""
        return lower_program(self.program, self.device)

    @cached_property
    def main_input_name(self) -> str:
        """The name of the first input."""
        return next(iter(example_inputs(self.program)))

    @cached_property
    def positions(self) -> dict[str, int]:
        """The number of positions of its tokens that the encoder knows; empty where there is no limit."""
        return positions_of(self.program)

    @cached_property
    def _call(self) -> Any:
        return self.lowered

    def compile(self, **options: Any) -> None:
        """Compile the program at its first call, for inputs of any size."""
        self._call = torch.compile(self.lowered, dynamic=True, **options)

    @torch.no_grad()
    def forward(self, **inputs: Any) -> Any:
        """Return the outputs of the program."""
        return self._call(**inputs)
