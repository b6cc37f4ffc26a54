"""The properties of an NVIDIA GPU, and of the memory, that kernels depend on."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def uses_pdl(device: torch.device) -> bool:
    """Return whether the device supports programmatic dependent launch: a kernel may start before the previous one
    ends."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def aligned(x: Tensor, size: int = 16) -> Tensor:
    """Return the same values, contiguous and aligned, since kernels read up to `size` bytes at a time."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % size else x
