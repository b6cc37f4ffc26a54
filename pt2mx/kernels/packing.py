"""Pack codes into bytes along one axis, in plain torch operations.

Design: numerics, storage. 4-bit codes two a byte, low nibble first; 6-bit codes four in three little-endian bytes;
other codes of up to 8 bits one a byte, wider ones one in two little-endian bytes.
"""

import math

import torch
from torch import Tensor

from pt2mx.kernels.axis import split_axis, trim_axis

#: bits of a packed code -> (codes, bytes) of the smallest group that fills whole bytes
_GROUPS = {bits: (8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)) for bits in (4, 6)}


def is_packed(bits: int) -> bool:
    """Return whether codes of `bits` bits share bytes, so that the number of bytes does not determine the number of
    codes."""
    return bits in _GROUPS


def group_of(bits: int) -> tuple[int, int]:
    """Return codes and bytes of one packed group; a code that is not packed is a group."""
    return _GROUPS.get(bits, (1, -(-bits // 8)))


def packed_length(length: int, bits: int) -> int:
    """Return the bytes that `length` codes of `bits` bits take along the packed axis."""
    codes, size = group_of(bits)
    return -(-length // codes) * size


def unpacked_length(size: int, bits: int) -> int:
    """Return the codes that `size` bytes hold, including the padding of the last group."""
    codes, group = group_of(bits)
    return size // group * codes


def pack(codes: Tensor, axis: int, bits: int) -> Tensor:
    """codes: (..., n, ...) int32 in [0, 2**bits) -> (..., packed_length(n), ...) uint8."""
    per_group, size = group_of(bits)
    if size == per_group:
        return codes.to(torch.uint8)
    codes = codes.to(_word_of(size))
    groups = split_axis(codes, axis, per_group)  # (..., groups, codes, ...)
    word = groups.select(axis + 1, 0)
    for i in range(1, per_group):
        word = word | groups.select(axis + 1, i) << (bits * i)
    shifts = _along(axis, codes, 8 * torch.arange(size, device=codes.device, dtype=torch.int32))
    data = (word.unsqueeze(axis + 1) >> shifts & 0xFF).to(torch.uint8).flatten(axis, axis + 1)
    return trim_axis(data, axis, packed_length(codes.shape[axis], bits))


def unpack(data: Tensor, axis: int, bits: int) -> Tensor:
    """data: (..., bytes, ...) uint8 -> (..., unpacked_length(bytes), ...) int32 codes; for a symbolic number of bytes
    with the padding of `group_count`."""
    per_group, size = group_of(bits)
    if size == per_group:
        return data.to(torch.int32) & ((1 << bits) - 1)
    data = data.to(_word_of(size))
    groups = split_axis(data, axis, size)  # (..., groups, bytes, ...)
    word = groups.select(axis + 1, 0)
    for i in range(1, size):
        word = word | groups.select(axis + 1, i) << (8 * i)
    shifts = _along(axis, data, bits * torch.arange(per_group, device=data.device, dtype=torch.int32))
    return (word.unsqueeze(axis + 1) >> shifts & ((1 << bits) - 1)).to(torch.int32).flatten(axis, axis + 1)


def _word_of(size: int) -> torch.dtype:
    """Return an integer dtype that holds a group of `size` bytes."""
    return torch.int32 if size <= 4 else torch.int64


def _along(axis: int, x: Tensor, vector: Tensor) -> Tensor:
    """Reshape `vector` to broadcast along a new dimension at `axis + 1` of `x`."""
    return vector.reshape((-1,) + (1,) * (x.dim() - 1 - axis))
