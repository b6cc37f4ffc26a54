"""The running variance that scales a weight in training, the same for every pass of a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake

from pt2mx.ops.snapshot import snapshot


class StepVariance(nn.Module):
    """Return the running variance as it was when the training step began.

    A training pass writes the running variance after it read it. If the scale of a quantized weight followed at once,
    a second pass over the same batch would see another weight, and activation checkpointing, which runs a pass again
    for its gradient, would compute the gradient of another function. A step begins with the first pass after a backward
    pass, or after `train()` or `eval()`. Compiled code reads the variance that the pass began with: it recomputes from
    the values that it saved.
    """

    variance: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", None, persistent=False)
        self._begins = True

    def forward(self, running: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or is_fake(running) or is_functorch_wrapped_tensor(running):
            return snapshot(running)
        if self.variance is None or (self._begins and not in_backward_pass()):
            self.variance, self._begins = running.clone(), False
        return self.variance

    def ends_with_gradient_of(self, y: Tensor) -> None:
        """End the step when the gradient of `y`, an output that the variance scaled, is computed."""
        if y.requires_grad and not torch.compiler.is_compiling():
            y.register_hook(self._end)

    def _end(self, gradient: Tensor) -> None:
        self._begins = True

    def train(self, mode: bool = True) -> StepVariance:
        """Switch the mode, which begins a step."""
        self._begins = True
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._begins = True


def in_backward_pass() -> bool:
    """Return True inside of a backward pass, where the only forward passes are those of activation checkpointing,
    which repeat a pass whose statistics were counted."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
