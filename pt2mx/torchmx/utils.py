"""4-bit codes in TorchMX's order, the first of two in the high nibble."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.packing import pack, packed_length, unpack, unpacked_length
from pt2mx.ops.checks import check_tensors


def tensor_size_hp_to_fp4x2(orig_size: Sequence[int], packing_dim: int) -> list[int]:
    """Return the size in bytes of 4-bit codes, of which a byte holds two along `packing_dim`."""
    size = list(orig_size)
    size[packing_dim] = packed_length(size[packing_dim], 4)
    return size


def tensor_size_fp4x2_to_hp(orig_size: Sequence[int], unpacking_dim: int) -> list[int]:
    """Return the size of the codes in bytes of `orig_size`."""
    size = list(orig_size)
    size[unpacking_dim] = unpacked_length(size[unpacking_dim], 4)
    return size


def pack_uint4(uint8_data: Tensor, packing_dim: int = -1) -> Tensor:
    """(..., n, ...) uint8 below 16 -> (..., ceil(n / 2), ...) uint8."""
    axis = _dimension(uint8_data, packing_dim)
    low_first = pack(uint8_data.to(torch.int32) & 0xF, axis, 4)
    return low_first << 4 | low_first >> 4


def unpack_uint4(uint8_data: Tensor, packing_dim: int = -1) -> Tensor:
    """(..., bytes, ...) uint8 -> (..., 2 * bytes, ...) uint8 below 16."""
    axis = _dimension(uint8_data, packing_dim)
    return unpack(uint8_data << 4 | uint8_data >> 4, axis, 4).to(torch.uint8)


def _dimension(data: Tensor, dim: int) -> int:
    check_tensors(uint8_data=data)
    if not isinstance(dim, int) or data.dtype != torch.uint8 or not -data.dim() <= dim < data.dim():
        raise MXError(
            f"4-bit codes are uint8 and have dimension {dim}, not {data.dtype} of shape {tuple(data.shape)}: convert "
            "them with .to(torch.uint8)"
        )
    return dim % data.dim()
