"""microxcaling's surface: emulate MX quantization in eager models, forward and backward, with `mx_specs` dictionaries.

A program written for microxcaling that multiplies and convolves runs with its imports changed from `mx` to
`pt2mx.microxcaling`. `PRESETS["microxcaling"]` in `pt2mx.compat` gives the numbers. Layers that only compute with
narrower floats, and functions that patch torch, raise an error that names them.
"""

import sys

from pt2mx.errors import MXError
from pt2mx.microxcaling.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose2d, conv1d, conv2d, conv3d
from pt2mx.microxcaling.elemwise_ops import quantize_bfloat, quantize_elemwise_op
from pt2mx.microxcaling.linear import Linear, linear
from pt2mx.microxcaling.matmul import bmm, matmul
from pt2mx.microxcaling.mx_ops import ElemFormat, RoundingMode, quantize_mx_op
from pt2mx.microxcaling.specs import (
    MxSpecs,
    add_mx_args,
    apply_mx_specs,
    finalize_mx_specs,
    get_backwards_mx_specs,
    get_default_mx_specs,
    get_mx_specs,
    mx_assert_test,
)

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "ElemFormat",
    "Linear",
    "MxSpecs",
    "RoundingMode",
    "add_mx_args",
    "apply_mx_specs",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "finalize_mx_specs",
    "get_backwards_mx_specs",
    "get_default_mx_specs",
    "get_mx_specs",
    "linear",
    "matmul",
    "mx_assert_test",
    "quantize_bfloat",
    "quantize_elemwise_op",
    "quantize_mx_op",
]

#: module of microxcaling -> the module here with its names
_MODULES = {
    "bmm": "matmul",
    "formats": "mx_ops",
    "quantize": "elemwise_ops",
    "transpose_convolution": "convolution",
}
for _theirs, _ours in _MODULES.items():  # `from pt2mx.microxcaling.formats import ElemFormat`
    sys.modules[f"{__name__}.{_theirs}"] = sys.modules[f"{__name__}.{_ours}"]
    globals().setdefault(_theirs, sys.modules[f"{__name__}.{_ours}"])

_FLOATS = (
    "computes in narrower floats and multiplies nothing: use torch's own, with quantize_bfloat around it where its "
    "result shall be rounded"
)
_COMPUTES_IN_FLOATS = """
    sigmoid tanh relu relu6 leaky_relu silu gelu Sigmoid Tanh ReLU ReLU6 LeakyReLU SiLU GELU softmax Softmax
    adaptive_avg_pool2d AdaptiveAvgPool2d BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm RMSNorm GroupNorm layer_norm
    simd_add simd_sub simd_mul simd_div simd_split simd_sqrt simd_square simd_exp simd_log simd_reduce_sum
    simd_reduce_mean simd_norm
"""
#: names of microxcaling that pt2mx lacks -> the reason, and what to use
NOT_OFFERED = {
    **dict.fromkeys(_COMPUTES_IN_FLOATS.split(), _FLOATS),
    "LSTM": "computes its gates in narrower floats: build it of linear, or quantize an exported one with MXQuantizer",
    "mx_mapping": "patches torch: quantize an exported model with MXQuantizer, or replace its layers by these",
}


def __getattr__(name: str) -> object:
    """An AttributeError would lose the reason: `from ... import name` makes an ImportError of it."""
    if name in NOT_OFFERED:
        raise MXError(f"pt2mx.microxcaling has no {name}: it {NOT_OFFERED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
