"""pychop's surface for MX formats, over pt2mx's kernels.

A program written for `pychop` 0.6.2 (or its `pychop.mx_formats`, `pychop.tch.mx_formats` and `pychop.jx.mx_formats`)
runs with its imports changed to `pt2mx.pychop`: the same names, positions, defaults and values. README.md lists the
differences.
"""

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
    "compare_mx_formats",
    "convert_linear_to_mx",
    "create_mx_spec",
    "create_mx_ste_quantizer",
    "mx_quantize",
]
