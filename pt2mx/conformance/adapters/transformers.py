"""transformers: the decoder of gpt-oss's MXFP4 weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pt2mx.conformance.adapters.case import Case


def cases() -> Iterator[Case]:
    """Yield MXFP4, decoding alone."""
    yield Case("fp4_e2m1", None, _dequantize, packing="low_first")


def _dequantize(data: Tensor, scale: Tensor) -> Tensor:
    blocks = data.view(1, len(data), -1, 16)  # (experts, rows, blocks, bytes)
    return convert_moe_packed_tensors(blocks, scale[None], dtype=torch.float32)[0].T
