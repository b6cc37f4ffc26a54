"""TorchMX's surface: eager models whose linear layers and attention compute with MX tensors, by configs of its names.

A program written for TorchMX runs with its imports changed from `torchmx` to `pt2mx.torchmx`, and `MXTensor` and
`dtypes` from `pt2mx`.
"""

from pt2mx.torchmx.config import MXConfig, QAttentionConfig, QLinearConfig
from pt2mx.torchmx.layers.mx_linear import MXInferenceLinear
from pt2mx.torchmx.quant_api import quantize_linear_, quantize_llm_

__all__ = [
    "MXConfig",
    "MXInferenceLinear",
    "QAttentionConfig",
    "QLinearConfig",
    "quantize_linear_",
    "quantize_llm_",
]
