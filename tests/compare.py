"""Comparisons of tensors: to the bit, and by the size of the error."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def same(got: Tensor, want: Tensor) -> bool:
    """Return whether dtype, shape and bits are equal, except payloads of NaNs, on any devices."""
    return (got.dtype, got.shape) == (want.dtype, want.shape) and not differing(got, want).any()


def differing(got: Tensor, want: Tensor) -> Tensor:
    """Return where two tensors of one dtype and shape differ: bool, on the CPU."""
    got, want = got.detach().cpu(), want.detach().cpu()
    bits = _INTEGERS[got.element_size()]
    return (got.view(bits) != want.view(bits)) & ~(got.isnan() & want.isnan())


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the norm of the difference over the norm of `want`, on any devices."""
    got, want = (x.detach().cpu().double() for x in (got, want))
    return ((got - want).norm() / want.norm()).item()


def gradient_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the gradient of x of the sum of the squares of a model's result."""
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(model(leaf).float().square().sum(), leaf)[0]


def sqnr(got: Tensor, want: Tensor) -> float:
    """Return the signal-to-noise ratio in dB."""
    error = relative_error(got, want)
    return -20 * math.log10(error) if error else math.inf
