"""TorchMX's helpers: seeds, a logger, random inputs, and 4-bit codes in its order, the first in the high nibble."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.packing import pack, packed_length, unpack, unpacked_length
from pt2mx.ops.checks import check_tensors


def set_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, on all devices.

    Args:
        seed: the seed of all three.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_logger(
    logger_name: str = "TORCHMX",
    format_string: str = "%(asctime)s - %(name)s - %(levelname)s - %(message)s",
    console_output: bool = True,
) -> logging.Logger:
    """Return a logger that writes to the console and to the file of the environment variable `LOG_FILE`, from the level
    of `LOG_LEVEL` on (by default INFO). A second call returns a logger that still writes each line once.

    Args:
        logger_name: its name.
        format_string: the format of a line, as `logging.Formatter` takes it.
        console_output: false for no lines on the console.

    Returns:
        The logger.
    """
    logger = logging.getLogger(logger_name)
    logger.setLevel(os.environ.get("LOG_LEVEL", "INFO"))
    logger.propagate = False
    if not logger.handlers:
        path = os.environ.get("LOG_FILE")
        for handler in [logging.StreamHandler()] * console_output + ([logging.FileHandler(path)] if path else []):
            handler.setFormatter(logging.Formatter(format_string))
            logger.addHandler(handler)
    return logger


def get_uniform_random_number(min_val: int, max_val: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Draw uniform random numbers from torch's generator.

    Args:
        min_val, max_val: the limits.
        shape, dtype: of the result.

    Returns:
        Numbers from `min_val` to `max_val`.
    """
    return (max_val - min_val) * torch.rand(*shape, dtype=dtype) + min_val


def tensor_size_hp_to_fp4x2(orig_size: Sequence[int], packing_dim: int) -> list[int]:
    """Return the size of 4-bit codes.

    Args:
        orig_size: of the values.
        packing_dim: the dimension along which a byte holds two.

    Returns:
        The size in bytes; an odd number of codes fills the last byte.

    Example:
        >>> from pt2mx.torchmx.utils import tensor_size_hp_to_fp4x2
        >>> tensor_size_hp_to_fp4x2((2, 5), -1)
        [2, 3]
    """
    size = list(orig_size)
    size[packing_dim] = packed_length(size[packing_dim], 4)
    return size


def tensor_size_fp4x2_to_hp(orig_size: Sequence[int], unpacking_dim: int) -> list[int]:
    """Return the size of the values of 4-bit codes.

    Args:
        orig_size: of the bytes.
        unpacking_dim: the dimension along which a byte holds two.

    Returns:
        The size of the values.

    Example:
        >>> from pt2mx.torchmx.utils import tensor_size_fp4x2_to_hp
        >>> tensor_size_fp4x2_to_hp((2, 3), -1)
        [2, 6]
    """
    size = list(orig_size)
    size[unpacking_dim] = unpacked_length(size[unpacking_dim], 4)
    return size


def pack_uint4(uint8_data: Tensor, packing_dim: int = -1) -> Tensor:
    """Pack 4-bit codes, the first of two in the high nibble.

    Args:
        uint8_data: (..., n, ...) uint8 below 16.
        packing_dim: the dimension of n.

    Returns:
        (..., ceil(n / 2), ...) uint8.

    Raises:
        MXError: for another dtype, or a dimension that the codes do not have.

    Example:
        >>> import torch
        >>> from pt2mx.torchmx.utils import pack_uint4
        >>> [hex(byte) for byte in pack_uint4(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))]
        ['0x12', '0x34']
    """
    axis = _dimension(uint8_data, packing_dim)
    low_first = pack(uint8_data.to(torch.int32) & 0xF, axis, 4)
    return low_first << 4 | low_first >> 4


def unpack_uint4(uint8_data: Tensor, packing_dim: int = -1) -> Tensor:
    """Unpack 4-bit codes that `pack_uint4` packed.

    Args:
        uint8_data: (..., bytes, ...) uint8.
        packing_dim: the dimension of bytes.

    Returns:
        (..., 2 * bytes, ...) uint8 below 16.

    Raises:
        MXError: as `pack_uint4`.

    Example:
        >>> import torch
        >>> from pt2mx.torchmx.utils import unpack_uint4
        >>> unpack_uint4(torch.tensor([0x12, 0x34], dtype=torch.uint8))
        tensor([1, 2, 3, 4], dtype=torch.uint8)
    """
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
