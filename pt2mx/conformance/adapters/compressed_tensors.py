"""compressed-tensors: scales of observers, and the compressors of MXFP4, MXFP6 and MXFP8; llm-compressor uses both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from pt2mx.conformance.adapters.case import Case

_FORMATS = {
    "fp8_e4m3": (8, "mxfp8-quantized", "weight"),
    "fp6_e2m3": (6, "mxfp6-pack-quantized", "weight_packed"),
    "fp4_e2m1": (4, "mxfp4-pack-quantized", "weight_packed"),
}


def cases() -> Iterator[Case]:
    """Yield the formats that have a compressor."""
    for name, (bits, compressor, key) in _FORMATS.items():
        arguments = QuantizationArgs(
            num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        codec = BaseCompressor.get_value_from_registry(compressor)
        yield Case(name, partial(_quantize, codec, scheme, key), partial(_dequantize, codec, scheme, key))


def _quantize(codec: type[BaseCompressor], scheme: QuantizationScheme, key: str, x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    state = codec.compress({"weight": x, "weight_scale": scale}, scheme)
    return state["weight_scale"], state[key]


def _dequantize(
    codec: type[BaseCompressor], scheme: QuantizationScheme, key: str, data: Tensor, scale: Tensor
) -> Tensor:
    data = data.view(torch.float8_e4m3fn) if scheme.weights.num_bits == 8 else data
    return codec.decompress({key: data, "weight_scale": scale}, scheme)["weight"]
