"""The output error and the held-out batches, for learned rounding and distillation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError

#: one batch of eight is held out, at most 64 in all
_HELD_OUT, _MOST = 8, 64
#: keeps gradients above the smallest float16 and above Adam's epsilon; the scale cancels in Adam and in signed descent
LOSS_SCALE = 4096.0
#: a logit of probability zero that is finite, so that the difference of two is zero
_LEAST_LOGIT = -1e30


def relative_error(outputs: object, references: object) -> Tensor:
    """Return the squared error of outputs over their squared value, () float32: the mean over all float tensors."""
    return _mean(_relative, outputs, references)


def kl_divergence(outputs: object, references: object) -> Tensor:
    """Return the Kullback-Leibler divergence from the references' predictions to the outputs', () float32, in nats.

    Both are logits with classes in the last dimension. The divergence is the mean over all rows and tensors.
    """
    return _mean(_divergence, outputs, references)


#: the losses of `distill`, by name
LOSSES: dict[str, Callable[[object, object], Tensor]] = {"relative": relative_error, "kl_div": kl_divergence}


def _mean(loss: Callable[[Tensor, Tensor], Tensor], outputs: object, references: object) -> Tensor:
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(references), strict=True)
    losses = [loss(y, r) for y, r in pairs if isinstance(r, Tensor) and r.is_floating_point() and r.numel()]
    if not losses:
        raise MXError("the outputs hold no float tensor to compare")
    return torch.stack(losses).mean()


def _divergence(logits: Tensor, reference: Tensor) -> Tensor:
    classes = reference.shape[-1] if reference.dim() else 1
    # a class that a mask excludes with -inf counts as no error
    y, r = (x.float().clamp(min=_LEAST_LOGIT).reshape(-1, classes) for x in (logits, reference.detach()))
    return kl_div(y.log_softmax(1), r.log_softmax(1), log_target=True, reduction="batchmean")


def _relative(output: Tensor, reference: Tensor) -> Tensor:
    """Return the relative error of one tensor. Equal infinities, such as in a mask, count as no error."""
    reference = reference.detach().float()
    finite = reference.isfinite()
    reference = torch.where(finite, reference, 0.0)
    error = torch.where(finite, output.float(), 0.0) - reference
    return error.square().sum() / reference.square().sum().clamp(min=torch.finfo(torch.float32).tiny)


def hold_out(count: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Return the indices of the batches to train on, and of the held-out ones that choose the best step.

    One batch of eight is held out at random, at least one and at most 64; a single batch is both.
    """
    order = torch.randperm(count, generator=generator).tolist()
    size = min(-(-count // _HELD_OUT), _MOST) if count > 1 else 0
    return sorted(order[size:]), sorted(order[:size] or order)


def check_batches(batches: object) -> None:
    """Raise an MXError unless `batches` is a list of batches."""
    if isinstance(batches, Tensor | dict) or not isinstance(batches, Sequence):
        raise MXError(
            f"batches must be a list of batches, not {type(batches).__name__}: pass [batch], or list(batches)"
        )
    if not batches:
        raise MXError("batches is empty: give batches of inputs")


def call_with_batch(function: Callable[..., object], batch: object) -> object:
    """Call a function on a batch: a tuple of positional or a dictionary of named arguments, or one tensor.

    The function gets copies, because a model may write to its inputs. They are detached: the gradient of a batch that
    another model computed would run through that model, which can be done once.
    """
    batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), batch)
    if isinstance(batch, dict):
        return function(**batch)
    return function(*(batch if isinstance(batch, tuple | list) else (batch,)))
