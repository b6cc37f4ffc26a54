"""TorchMX's surface: its tensors, and eager models whose linear layers and attention compute with them.

A program written for TorchMX runs with its imports changed from `torchmx` to `pt2mx.torchmx`.
"""

from pt2mx.torchmx import dtypes
from pt2mx.torchmx.config import MXConfig, QAttentionConfig, QLinearConfig
from pt2mx.torchmx.layers.mx_linear import MXInferenceLinear
from pt2mx.torchmx.mx_tensor import MXTensor
from pt2mx.torchmx.quant_api import mx_dynamic_activation_mx_weights, quantize_linear_, quantize_llm_

__all__ = [
    "MXConfig",
    "MXInferenceLinear",
    "MXTensor",
    "QAttentionConfig",
    "QLinearConfig",
    "dtypes",
    "mx_dynamic_activation_mx_weights",
    "quantize_linear_",
    "quantize_llm_",
]
