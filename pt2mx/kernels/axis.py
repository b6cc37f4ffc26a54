"""Pad an axis to whole groups, split it, and trim it again, for known and symbolic lengths."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

#: whether traced code is guarded: torch.compile checks the sizes that it relies on before it runs
_has_guards: ContextVar[bool] = ContextVar("has_guards", default=False)


@contextmanager
def guards(kept: bool) -> Iterator[None]:
    """Tell `group_count` whether code traced in this context is guarded."""
    token = _has_guards.set(kept)
    try:
        yield
    finally:
        _has_guards.reset(token)


def group_count(length: int, size: int) -> int:
    """Return the number of groups of `size` for `length` values; for a symbolic length maybe one more.

    Tracing asks whether a size is 1, and whether padding changes the length. Without guards (AOTInductor, torch.export)
    the answers for the example inputs would become fixed for all inputs; with one extra group, both answers are always
    no. With guards, a single group gets its own code, which needs no index.
    """
    count = -(-length // size)
    if isinstance(length, int):
        return count
    if not _has_guards.get():
        return count + 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # a slow import that eager calls do not need

    return 1 if guard_or_false(length <= size) else count


def is_one_in_the_example(size: int) -> bool:
    """Return whether tracing without guards would fix a symbolic size to 1: some operators ask whether sizes of a dense
    tensor are 1."""
    if isinstance(size, int) or _has_guards.get():
        return False
    return size.node.has_hint() and size.node.hint == 1


def pad_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """Append zeros to `x` along `axis` (non-negative), up to `group_count` groups; (..., n, ...) any dtype."""
    length = x.shape[axis]
    if isinstance(length, int) and length % size == 0:
        return x
    pad = group_count(length, size) * size - length  # for a symbolic length without a branch
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, pad))


def split_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """(..., n, ...) -> (..., group_count, size, ...), padded with zeros."""
    return pad_axis(x, axis, size).unflatten(axis, (group_count(x.shape[axis], size), size))


def has_length(x: Tensor, axis: int, length: int) -> bool:
    """True if x is known to have `length` values along `axis`; of symbolic sizes that is not asked."""
    return isinstance(length, int) and isinstance(x.shape[axis], int) and x.shape[axis] == length


def trim_axis(x: Tensor, axis: int, length: int) -> Tensor:
    """Return the first `length` values along `axis`; x itself if it has no more."""
    return x if has_length(x, axis, length) else x.narrow(axis, 0, length)


def resized(x: Tensor, axis: int, size: int) -> list[int]:
    """Return x's shape with another size along `axis`."""
    return [*x.shape[:axis], size, *x.shape[axis + 1 :]]
