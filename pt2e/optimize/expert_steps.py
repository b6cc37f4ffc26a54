"""Steps of Adam for the parameters of experts: an expert that saw no token stays as it is, to the bit.

Adam moves a weight by its momentum where the gradient is zero. Here each slice along the first dimension counts its own
steps, and one without a gradient keeps its values and moments, as if the step had not been taken.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def initial_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return what Adam keeps of a parameter, (experts, ...): the steps of each expert, (experts,), and two moments."""
    return {
        "step": torch.zeros_like(parameter.unsqueeze(-1).flatten(1)[:, 0]),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


@torch.no_grad()
def step_experts(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, betas: tuple[float, float], eps: float
) -> None:
    """Take a step in the experts that have a gradient, in place; ranks hold whole experts."""
    parameter, gradient = _local(parameter), _local(gradient)
    step, first, second = (_local(tensor) for tensor in state.values())
    seen = gradient.ne(0).unsqueeze(-1).flatten(1).any(1)  # (experts,)
    step += seen
    shape = -1, *(1 for _ in gradient.shape[1:])
    seen, steps = seen.view(shape), step.clamp(min=1).view(shape)
    first.lerp_(gradient, (1 - betas[0]) * seen)
    second.lerp_(gradient.square(), (1 - betas[1]) * seen)
    deviation = (second / (1 - betas[1] ** steps)).sqrt() + eps
    parameter.copy_(torch.where(seen, parameter - lr * (first / (1 - betas[0] ** steps)) / deviation, parameter))


def _local(tensor: Tensor) -> Tensor:
    """Return the slices of a tensor that this rank holds, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
