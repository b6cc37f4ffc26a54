"""The running variance that scales a weight in training, the same for every pass of a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake

from pt2mx.ops.step_variance import in_backward_pass, step_variance


class StepVariance(nn.Module):
    """Return the running variance as it was when the training step began.

    A training pass writes the running variance after it read it. If the scale of a quantized weight changed at once, a
    second pass over the same batch would see another weight. Activation checkpointing, which repeats a pass for its
    gradient, would then compute the gradient of another function. A step begins with the first pass after a backward
    pass, after one whose outputs need no gradient, and after `train()` or `eval()`. In compiled code, each pass begins
    a step, except one that a backward pass repeats.

    Args:
        like: (channels,), a tensor of the running variance's shape, dtype and device.
    """

    variance: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        variance = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        self.register_buffer("variance", variance, persistent=False)
        self._begins = True

    def forward(self, running: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return step_variance(running, self.variance)
        if is_fake(running) or is_functorch_wrapped_tensor(running):
            return running.clone()
        if self._begins and not in_backward_pass():
            self.variance, self._begins = running.clone(), False
        return self.variance

    def ends_with_gradient_of(self, y: Tensor) -> None:
        """End the step when the gradient of `y`, an output that the variance scaled, is computed. End it now if `y`
        needs no gradient, because the layer and those before it are frozen."""
        if torch.compiler.is_compiling():
            return
        if y.requires_grad:
            y.register_hook(self._end)
        elif torch.is_grad_enabled():  # not in the first pass of reentrant checkpointing
            self._begins = True

    def _end(self, gradient: Tensor) -> None:
        self._begins = True

    def train(self, mode: bool = True) -> StepVariance:
        """Switch the mode, and begin a new step."""
        self._begins = True
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._begins = True
