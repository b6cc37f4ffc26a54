"""pychop's surface for MX formats, over pt2mx's kernels.

A program written for `pychop` 0.6.2 (or its `pychop.mx_formats`, `pychop.tch.mx_formats` and `pychop.jx.mx_formats`)
runs with its imports changed to `pt2mx.pychop`: the same names, positions, defaults and values. What differs:

- TensorFlow is left out, and so are Flax's `MXDense` and pychop's formats beside MX.
- `block_size` counts with every array library; pychop's torch and JAX backends take 32 for formats given by name.
- float64, integers and lists are cast to float32 before they are quantized, and the result to the floating dtype that
  they came in; pychop computes in the data's own dtype, and gives integers for integer tensors.
- Scales come from exponent bits; pychop's rounded log2 is off by one a few ulps below a power of two. -0 stays -0 in
  float elements, and an Inf or a NaN makes its block NaN, which pychop passes by value.
- Elements have at most 16 bits, and 7 exponent bits.
"""

from pt2mx.analysis.compare import print_mx_format_table
from pt2mx.pychop.backend import backend, get_backend
from pt2mx.pychop.formats import MX_FORMATS, MXSpec, create_mx_spec
from pt2mx.pychop.layers import MXAttention, MXLinear, MXQuantizerSTE, convert_linear_to_mx
from pt2mx.pychop.quantize import MXTensor, compare_mx_formats, create_mx_ste_quantizer, mx_quantize

__all__ = [
    "MX_FORMATS",
    "MXAttention",
    "MXLinear",
    "MXQuantizerSTE",
    "MXSpec",
    "MXTensor",
    "backend",
    "compare_mx_formats",
    "convert_linear_to_mx",
    "create_mx_spec",
    "create_mx_ste_quantizer",
    "get_backend",
    "mx_quantize",
    "print_mx_format_table",
]
