"""gfloat: `encode_block` and `decode_block`, with its scale of the largest magnitude."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from gfloat import BlockFormatInfo, decode_block, quantize_block
from gfloat.block import compute_scale_amax
from gfloat.formats import all_block_formats

from pt2mx.conformance.adapters.case import Case
from pt2mx.formats import parse_element


def cases() -> Iterator[Case]:
    """Yield every format."""
    for info in all_block_formats:
        name = parse_element(info.name).name
        packing = "bytes" if info.etype.bits < 8 else None
        yield Case(name, partial(_quantize, info), partial(_dequantize, info), packing=packing, framework="numpy")


def _quantize(info: BlockFormatInfo, x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(len(x), -1, 32).reshape(-1, 32).astype(np.float64)
    return np.stack([quantize_block(info, block, compute_scale_amax) for block in blocks]).reshape(x.shape)


def _dequantize(info: BlockFormatInfo, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    blocks = np.concatenate([scale.reshape(-1, 1), data.reshape(-1, 32)], axis=-1)
    return np.array([list(decode_block(info, block)) for block in blocks.tolist()]).reshape(data.shape)
