"""Packing of codes into bytes along one axis, in plain torch operations.

Design: numerics, storage. 8-bit codes one a byte; 4-bit codes two a byte, low nibble first; 6-bit codes four in three
little-endian bytes.
"""

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


def groups(length: int, size: int) -> int:
    """Groups of `size` that hold `length` values; of a symbolic length at least two.

    A compiler asks of every size whether it is 1, to leave it out of indices. AOTInductor keeps what is true of the
    example that a program was exported with, without a guard: code for one group would run for more of them.
    """
    count = -(-length // size)
    return count if isinstance(length, int) else torch.sym_max(count, 2)


def pad_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """`x` with zeros appended along `axis` (non-negative) to whole `groups` of `size`; (..., n, ...) any dtype."""
    length = x.shape[axis]
    if isinstance(length, int) and length % size == 0:
        return x
    pad = groups(length, size) * size - length  # without a branch where the length is symbolic
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, pad))


def split_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """(..., n, ...) -> (..., groups, size, ...), the last groups filled with zeros."""
    return pad_axis(x, axis, size).unflatten(axis, (groups(x.shape[axis], size), size))


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
    parts = split_axis(codes, axis, per_group)  # (..., groups, codes, ...)
    word = parts.select(axis + 1, 0)
    for i in range(1, per_group):
        word = word | parts.select(axis + 1, i) << (bits * i)
    shifts = _along(axis, codes, 8 * torch.arange(size, device=codes.device, dtype=torch.int32))
    data = (word.unsqueeze(axis + 1) >> shifts & 0xFF).to(torch.uint8).flatten(axis, axis + 1)
    return trim_axis(data, axis, packed_length(codes.shape[axis], bits))


def unpack(data: Tensor, axis: int, bits: int) -> Tensor:
    """data: (..., bytes, ...) uint8 -> (..., unpacked_length(bytes), ...) int32 codes; of symbolic bytes, the codes of
    at least two `groups`."""
    data = data.to(torch.int32)
    if not is_packed(bits):
        return data & ((1 << bits) - 1)
    per_group, size = _GROUPS[bits]
    parts = split_axis(data, axis, size)  # (..., groups, bytes, ...)
    word = parts.select(axis + 1, 0)
    for i in range(1, size):
        word = word | parts.select(axis + 1, i) << (8 * i)
    shifts = _along(axis, data, bits * torch.arange(per_group, device=data.device, dtype=torch.int32))
    return (word.unsqueeze(axis + 1) >> shifts & ((1 << bits) - 1)).flatten(axis, axis + 1)


def _along(axis: int, x: Tensor, vector: Tensor) -> Tensor:
    """`vector` shaped to broadcast along a new dimension at `axis + 1` of `x`."""
    return vector.reshape((-1,) + (1,) * (x.dim() - 1 - axis))
