"""`pt2mx::snapshot`: the values of a tensor that a compiled pass writes later, kept for its gradient."""

import torch
from torch import Tensor

# AOTAutograd may compute a clone again in the backward pass, from the tensor as the forward pass left it; it saves the
# result of an operator that is not torch's own.
torch.library.define("pt2mx::snapshot", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("pt2mx::snapshot", "CompositeExplicitAutograd")
@torch.library.register_fake("pt2mx::snapshot")
def _snapshot(x: Tensor) -> Tensor:
    return x.clone()


def snapshot(x: Tensor) -> Tensor:
    """Return a copy of x that the gradient of a compiled pass can read after the pass wrote to x.

    Args:
        x: of any shape and dtype, without a gradient.
    """
    return torch.ops.pt2mx.snapshot(x)
