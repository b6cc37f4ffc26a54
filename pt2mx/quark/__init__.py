"""AMD Quark's surface for MX formats: its ONNX quantizer, by its names.

A program written for Quark 0.13 that quantizes to MX formats runs with its imports changed from `quark.onnx` to
`pt2mx.quark`. `PRESETS["quark"]` in `pt2mx.compat` gives the numbers, and lists the bugs that pt2mx does not reproduce.
"""

from pt2mx.quark.attributes import (
    DEFAULT_MICROSCALING_PARAMS,
    MX_OP_DEFAULT_ATTRS,
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    VitisQuantFormat,
    VitisQuantType,
    mx_quantize_dequantize,
    mx_spec,
)
from pt2mx.quark.config import Config, QuantizationConfig
from pt2mx.quark.model_quantizer import ModelQuantizer

__all__ = [
    "DEFAULT_MICROSCALING_PARAMS",
    "MX_OP_DEFAULT_ATTRS",
    "CalibrationMethod",
    "Config",
    "ExtendedQuantFormat",
    "ExtendedQuantType",
    "ModelQuantizer",
    "QuantizationConfig",
    "VitisQuantFormat",
    "VitisQuantType",
    "mx_quantize_dequantize",
    "mx_spec",
]
