"""NNCF: quantization and dequantization of weights in its modes MXFP4 and MXFP8_E4M3. It returns values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from nncf import CompressWeightsMode
from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
from nncf.quantization.algorithms.weight_compression.weight_lowering import float_quantize_dequantize_weight
from nncf.tensor import Tensor

from pt2mx.conformance.adapters.case import Case

_MODES = {"fp8_e4m3": CompressWeightsMode.MXFP8_E4M3, "fp4_e2m1": CompressWeightsMode.MXFP4}


def cases() -> Iterator[Case]:
    """Yield the two formats."""
    for name, mode in _MODES.items():
        yield Case(name, partial(_quantize, WeightCompressionConfig(mode, 32)), framework="numpy")


def _quantize(config: WeightCompressionConfig, x: np.ndarray) -> np.ndarray:
    return float_quantize_dequantize_weight(Tensor(x), config, (1,)).as_numpy_tensor().data.reshape(x.shape)
