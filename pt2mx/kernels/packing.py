"""Packing of codes into bytes along one axis, in plain torch operations.

Design: numerics, storage. 8-bit codes one a byte; 4-bit codes two a byte, low nibble first; 6-bit codes four in three
little-endian bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

#: bits of a code -> (codes, bytes) of one packed group; other widths take a byte a code
_GROUPS = {4: (2, 1), 6: (4, 3)}


def is_packed(bits: int) -> bool:
    """Whether codes of `bits` bits share bytes, so that bytes alone do not tell how many codes they hold."""
    return bits in _GROUPS


def packed_length(length: int, bits: int) -> int:
    """Bytes that `length` codes of `bits` bits take along the packed axis."""
    codes, size = _GROUPS.get(bits, (1, 1))
    return -(-length // codes) * size


def unpacked_length(size: int, bits: int) -> int:
    """Codes that `size` bytes hold, the padding of the last group included."""
    codes, group = _GROUPS.get(bits, (1, 1))
    return size // group * codes


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
    """Whether x is known to have `length` values along `axis`; of symbolic sizes that is not asked."""
    return isinstance(length, int) and isinstance(x.shape[axis], int) and x.shape[axis] == length


def trim_axis(x: Tensor, axis: int, length: int) -> Tensor:
    """The first `length` along `axis`; x itself where it has no more."""
    return x if has_length(x, axis, length) else x.narrow(axis, 0, length)


def pack(codes: Tensor, axis: int, bits: int) -> Tensor:
    """codes: (..., n, ...) int32 in [0, 2**bits) -> (..., packed_length(n), ...) uint8."""
    if not is_packed(bits):
        return codes.to(torch.uint8)
    per_group, size = _GROUPS[bits]
    groups = split_axis(codes, axis, per_group)  # (..., groups, codes, ...)
    word = groups.select(axis + 1, 0)
    for i in range(1, per_group):
        word = word | groups.select(axis + 1, i) << (bits * i)
    shifts = _along(axis, codes, 8 * torch.arange(size, device=codes.device, dtype=torch.int32))
    data = (word.unsqueeze(axis + 1) >> shifts & 0xFF).to(torch.uint8).flatten(axis, axis + 1)
    return trim_axis(data, axis, packed_length(codes.shape[axis], bits))


def unpack(data: Tensor, axis: int, bits: int) -> Tensor:
    """data: (..., bytes, ...) uint8 -> (..., unpacked_length(bytes), ...) int32 codes; of symbolic bytes, with the
    filling of `group_count`."""
    data = data.to(torch.int32)
    if not is_packed(bits):
        return data & ((1 << bits) - 1)
    per_group, size = _GROUPS[bits]
    groups = split_axis(data, axis, size)  # (..., groups, bytes, ...)
    word = groups.select(axis + 1, 0)
    for i in range(1, size):
        word = word | groups.select(axis + 1, i) << (8 * i)
    shifts = _along(axis, data, bits * torch.arange(per_group, device=data.device, dtype=torch.int32))
    return (word.unsqueeze(axis + 1) >> shifts & ((1 << bits) - 1)).flatten(axis, axis + 1)


def _along(axis: int, x: Tensor, vector: Tensor) -> Tensor:
    """`vector` shaped to broadcast along a new dimension at `axis + 1` of `x`."""
    return vector.reshape((-1,) + (1,) * (x.dim() - 1 - axis))
