"""gguf: MXFP4 of `gguf-py`, the Python package of llama.cpp. A block is its scale byte and 16 bytes of codes."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np

from pt2mx.conformance.adapters.case import Case

_BLOCK = 17  # bytes


def cases() -> Iterator[Case]:
    """Yield MXFP4, in the package's own order of codes."""
    yield Case("fp4_e2m1", _quantize, _dequantize, packing="halves", framework="numpy")


def _quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = gguf.quantize(x, gguf.GGMLQuantizationType.MXFP4).reshape(len(x), -1, _BLOCK)
    return blocks[..., 0], blocks[..., 1:].reshape(len(x), -1)


def _dequantize(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    blocks = np.concatenate([scale[..., None], data.reshape(len(data), -1, _BLOCK - 1)], axis=-1)
    return gguf.dequantize(blocks.reshape(len(data), -1), gguf.GGMLQuantizationType.MXFP4)
