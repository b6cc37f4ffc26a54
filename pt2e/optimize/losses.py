"""The common part of learned rounding and distillation: the error of outputs, and the batches that are held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError

#: one of so many batches is held out
_HELD_OUT = 8
#: keeps gradients above the smallest of float16, and above the epsilon of Adam; it divides by their size anyway, and of
#: a signed gradient only the sign counts
LOSS_SCALE = 4096.0


def relative_error(found: object, wanted: object) -> Tensor:
    """The squared error of outputs over the squared value, () float32; the mean of it over all float tensors."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    errors = [_relative(f, w) for f, w in pairs if isinstance(w, Tensor) and w.is_floating_point() and w.numel()]
    if not errors:
        raise MXError("the outputs hold no float tensor to compare")
    return torch.stack(errors).mean()


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    """Of infinities, such as those of a mask, that both have, there is no error."""
    wanted = wanted.detach().float()
    finite = wanted.isfinite()
    wanted = torch.where(finite, wanted, 0.0)
    error = torch.where(finite, found.float(), 0.0) - wanted
    return error.square().sum() / wanted.square().sum().clamp(min=torch.finfo(torch.float32).tiny)


def hold_out(count: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """The numbers of the batches to train on, and of those that say which step was best: one of eight, at random, and
    at least one; a single batch is both."""
    order = torch.randperm(count, generator=generator).tolist()
    held = -(-count // _HELD_OUT) if count > 1 else 0
    return sorted(order[held:]), sorted(order[:held] or order)


def check_batches(batches: object) -> None:
    """Raise an MXError for what is no list of batches."""
    if isinstance(batches, Tensor | dict) or not isinstance(batches, Sequence):
        raise MXError(
            f"batches must be a list of batches, not {type(batches).__name__}: pass [batch], or list(batches)"
        )
    if not batches:
        raise MXError("batches is empty: give batches of inputs")


def called_with(function: Callable[..., object], batch: object) -> object:
    """The result for a batch: a tuple of positional or a dictionary of named arguments, or one tensor. It gets copies,
    for a model may write to its inputs."""
    batch = pytree.tree_map_only(Tensor, Tensor.clone, batch)
    if isinstance(batch, dict):
        return function(**batch)
    return function(*(batch if isinstance(batch, tuple | list) else (batch,)))
