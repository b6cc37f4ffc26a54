"""Lengths along one axis: filled up to whole groups and cut again, known or symbolic; shapes with another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

#: whether sizes that the traced code relies on are checked before it runs, as torch.compile's are
_has_guards: ContextVar[bool] = ContextVar("has_guards", default=False)


@contextmanager
def guards(kept: bool) -> Iterator[None]:
    """Tell `group_count` whether code that is traced meanwhile is guarded."""
    token = _has_guards.set(kept)
    try:
        yield
    finally:
        _has_guards.reset(token)


def group_count(length: int, size: int) -> int:
    """Groups of `size` to hold `length` values; of a symbolic length maybe one more.

    Tracing asks whether a size is 1, and whether a filled length is the true one. Without guards (AOTInductor,
    torch.export) what is so in the example is taken to be so always; with one group more neither ever is. With guards
    there is code of its own for one group, which needs no index.
    """
    count = -(-length // size)
    if isinstance(length, int):
        return count
    if not _has_guards.get():
        return count + 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports much that eager calls do without

    return 1 if guard_or_false(length <= size) else count


def is_one_in_the_example(size: int) -> bool:
    """True if code that is traced without guards would take a symbolic size to be 1 always: some operators ask for that
    of a dense tensor."""
    if isinstance(size, int) or _has_guards.get():
        return False
    return size.node.has_hint() and size.node.hint == 1


def pad_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """`x` with zeros appended along `axis` (non-negative) up to `group_count` groups; (..., n, ...) any dtype."""
    length = x.shape[axis]
    if isinstance(length, int) and length % size == 0:
        return x
    pad = group_count(length, size) * size - length  # without a branch where the length is symbolic
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, pad))


def split_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """(..., n, ...) -> (..., group_count, size, ...), filled with zeros."""
    return pad_axis(x, axis, size).unflatten(axis, (group_count(x.shape[axis], size), size))


def has_length(x: Tensor, axis: int, length: int) -> bool:
    """True if x is known to have `length` values along `axis`; of symbolic sizes that is not asked."""
    return isinstance(length, int) and isinstance(x.shape[axis], int) and x.shape[axis] == length


def trim_axis(x: Tensor, axis: int, length: int) -> Tensor:
    """The first `length` along `axis`; x itself where it has no more."""
    return x if has_length(x, axis, length) else x.narrow(axis, 0, length)


def resized(x: Tensor, axis: int, size: int) -> list[int]:
    """x's shape with another size along `axis`."""
    return [*x.shape[:axis], size, *x.shape[axis + 1 :]]
