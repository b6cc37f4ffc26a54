"""microxcaling's surface: emulate MX quantization in eager models, forward and backward, with `mx_specs` dictionaries.

A program written for microxcaling that multiplies and convolves runs with its imports changed from `mx` to
`pt2mx.microxcaling`. `PRESETS["microxcaling"]` in `pt2mx.compat` gives the numbers.
"""

import sys

from pt2mx.microxcaling.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose2d, conv1d, conv2d, conv3d
from pt2mx.microxcaling.elemwise_ops import quantize_bfloat, quantize_elemwise_op
from pt2mx.microxcaling.linear import Linear, linear
from pt2mx.microxcaling.matmul import bmm, matmul
from pt2mx.microxcaling.mx_ops import ElemFormat, quantize_mx_op
from pt2mx.microxcaling.specs import (
    MxSpecs,
    add_mx_args,
    apply_mx_specs,
    finalize_mx_specs,
    get_backwards_mx_specs,
    get_default_mx_specs,
    get_mx_specs,
)

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "ElemFormat",
    "Linear",
    "MxSpecs",
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
