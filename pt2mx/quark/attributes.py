"""Convert `MXAttributes` dictionaries of Quark's ONNX quantizer to specs, and compute its operator."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import Tensor

from pt2mx.compat import PRESETS
from pt2mx.errors import MXError, nearest
from pt2mx.formats import FORMATS
from pt2mx.ops.checks import check_tensors
from pt2mx.spec import MXSpec

#: the operator's defaults
MX_OP_DEFAULT_ATTRS = {"element_dtype": "int8", "axis": 1, "block_size": 32, "rounding_mode": 0}
#: the attributes of Quark's ready-made MX configs
DEFAULT_MICROSCALING_PARAMS = {**MX_OP_DEFAULT_ATTRS, "rounding_mode": 2}


def mx_spec(attributes: Mapping[str, object]) -> MXSpec:
    """Return the spec of an `MXAttributes` dictionary, by `PRESETS["quark"]`; int8 reaches down to -128.

    Keys are `element_dtype`, one of the six OCP elements by its name in `pt2mx.FORMATS`; `axis`; `block_size`; and
    `rounding_mode`: 0 (half away from zero), 1 (half up) or 2 (half to even), which only int8 uses.

    Raises:
        MXError: for another key or value.
    """
    return PRESETS["quark"].spec(**_arguments(attributes))


def mx_quantize_dequantize(x: Tensor, attributes: Mapping[str, object]) -> Tensor:
    """Quantize x, (..., n, ...) float32, float16 or bfloat16, and dequantize it, as Quark's ONNX operator
    `MXQuantizeDequantize` (`MXFixNeuron`) does. `axis` does not apply to a tensor of one dimension.

    Raises:
        MXError: as `mx_spec` and `pt2mx.fake_quantize_mx` do.
    """
    check_tensors(x=x)
    arguments = _arguments(attributes)
    if x.dim() < 2:
        arguments["axis"] = -1
    return PRESETS["quark"].fake_quantize(x, **arguments)


def _arguments(attributes: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of the preset's `spec`."""
    if not isinstance(attributes, Mapping):
        raise MXError(f"MXAttributes are a dictionary, not {attributes!r}")
    for key in attributes:
        if key not in MX_OP_DEFAULT_ATTRS:
            raise MXError(f"MXAttributes have no {key!r}: {nearest(key, MX_OP_DEFAULT_ATTRS)}")
    arguments: dict[str, Any] = {**MX_OP_DEFAULT_ATTRS, **attributes}
    element = arguments.pop("element_dtype")
    if not isinstance(element, str) or element not in FORMATS:
        raise MXError(f"unknown element_dtype {element!r} in MXAttributes: {nearest(element, FORMATS)}")
    return {"elem_dtype": element, **arguments}


class CalibrationMethod(Enum):
    """The calibration methods for ranges of activations. Every method gives the same file, as in Quark, because an MX
    scale depends on the values of its block alone."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class ExtendedQuantType(Enum):
    """The type of activations or weights. pt2mx supports one of them, `QMX`, an MX format."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    QBFP = 9
    QMX = 10


#: `ExtendedQuantType`'s older name
VitisQuantType = ExtendedQuantType


class ExtendedQuantFormat(Enum):
    """The nodes that quantize tensors in a graph; `QDQ` includes Quark's MX nodes."""

    QOperator = 0
    QDQ = 1


class VitisQuantFormat(Enum):
    """The nodes that quantize tensors in a graph, under older names; `MXFixNeuron` means MX formats for activations and
    weights."""

    QDQ = 2
    FixNeuron = 3
    BFPFixNeuron = 4
    MXFixNeuron = 5
