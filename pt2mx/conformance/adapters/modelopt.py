"""NVIDIA ModelOpt: its MXFP4 and MXFP8 tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor
from torch import Tensor

from pt2mx.conformance.adapters.case import Case


def cases() -> Iterator[Case]:
    """Yield MXFP8 and MXFP4."""
    yield Case("fp8_e4m3", _quantize_fp8, _dequantize_fp8)
    yield Case("fp4_e2m1", _quantize_fp4, _dequantize_fp4)


def _quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scale = MXFP8QTensor.quantize(x)
    return scale, quantized._quantized_data


def _dequantize_fp8(data: Tensor, scale: Tensor) -> Tensor:
    return MXFP8QTensor(data.shape, torch.float32, data.view(torch.float8_e4m3fn)).dequantize(scale=scale)


def _quantize_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scale = MXFP4QTensor.quantize(x, 32)
    return scale.view(len(x), -1), quantized._quantized_data


def _dequantize_fp4(data: Tensor, scale: Tensor) -> Tensor:
    shape = torch.Size([len(data), 2 * data.shape[1]])
    return MXFP4QTensor(shape, torch.float32, data).dequantize(scale=scale, block_sizes={-1: 32})
