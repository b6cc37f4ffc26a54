"""Comparison to the bit."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def same(got: Tensor, want: Tensor) -> bool:
    """Whether dtype, shape and bits are equal, but for the payloads of NaNs, on whatever devices."""
    got, want = got.cpu(), want.cpu()
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    nan = got.isnan()
    bits = _INTEGERS[got.element_size()]
    return torch.equal(nan, want.isnan()) and torch.equal(
        got.view(bits).masked_fill(nan, 0), want.view(bits).masked_fill(nan, 0)
    )
