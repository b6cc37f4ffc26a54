"""`pt2mx::step_variance`: the running variance that a compiled training pass scales a weight by."""

import torch
from torch import Tensor

# Not an operator of torch: AOTAutograd may compute those again in the backward pass, from the running variance as the
# forward pass left it.
torch.library.define(
    "pt2mx::step_variance", "(Tensor running, Tensor(a!) kept) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl("pt2mx::step_variance", "CompositeExplicitAutograd")
def _step_variance(running: Tensor, kept: Tensor) -> Tensor:
    if not in_backward_pass():
        kept.copy_(running)
    return kept.clone()


@torch.library.register_fake("pt2mx::step_variance")
def _fake(running: Tensor, kept: Tensor) -> Tensor:
    return running.clone()


def in_backward_pass() -> bool:
    """Return True inside of a backward pass, where the only forward passes are those of activation checkpointing,
    which repeat a pass whose statistics were counted. Compiled code asks when it is compiled: it gets False."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def step_variance(running: Tensor, kept: Tensor) -> Tensor:
    """Return a copy of a running variance, and keep one in `kept`; in a backward pass, return a copy of `kept`, which
    the pass that is repeated there read.

    Args:
        running, kept: (channels,) of one dtype, without gradients. Writes to `kept`.
    """
    return torch.ops.pt2mx.step_variance(running, kept)
