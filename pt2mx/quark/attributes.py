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
    """Return the spec of an `MXAttributes` dictionary. Quark's ONNX quantizer configures an MX tensor with it.

    Args:
        attributes: `element_dtype`, one of the six OCP elements by its name in `pt2mx.FORMATS`; `axis`; `block_size`;
            `rounding_mode` 0 (half away from zero), 1 (half up) or 2 (half to even), which only int8 uses.
            `MX_OP_DEFAULT_ATTRS` has the defaults.

    Returns:
        The spec by `PRESETS["quark"]`; int8 reaches down to -128.

    Raises:
        MXError: for another key or value.

    Example:
        >>> from pt2mx import quark
        >>> print(quark.mx_spec({"element_dtype": "fp6_e3m2", "block_size": 16}))
        mxfp6_e3m2{16}
        >>> print(quark.mx_spec({"rounding_mode": 2}))
        mxint8_full{32}
    """
    return PRESETS["quark"].spec(**_arguments(attributes))


def mx_quantize_dequantize(x: Tensor, attributes: Mapping[str, object]) -> Tensor:
    """Quantize and dequantize as Quark's ONNX operator `MXQuantizeDequantize` (`MXFixNeuron`) does.

    Args:
        x: (..., n, ...) float32, float16 or bfloat16. `axis` does not apply to a tensor of one dimension.
        attributes: as in `mx_spec`.

    Returns:
        (..., n, ...) in the dtype of x.

    Raises:
        MXError: as `mx_spec` and `pt2mx.fake_quantize_mx` do.

    Example:
        >>> import torch
        >>> from pt2mx import quark
        >>> x = torch.tensor([[1.0, 2.9, -5.9, 0.3]])
        >>> quark.mx_quantize_dequantize(x, {"element_dtype": "fp4_e2m1"})
        tensor([[ 1.0000,  3.0000, -6.0000,  0.5000]])
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


class _NamedEnum(Enum):
    def __str__(self) -> str:
        return self.name


class CalibrationMethod(Enum):
    """The calibration methods for ranges of activations. Every method gives the same file, as in Quark, because an MX
    scale depends on the values of its block alone.

    Example:
        >>> from pt2mx import quark
        >>> quark.CalibrationMethod.MinMax.name
        'MinMax'
    """

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class ExtendedQuantType(_NamedEnum):
    """The type of activations or weights. pt2mx supports one of them, `QMX`, an MX format.

    Example:
        >>> from pt2mx import quark
        >>> quark.ExtendedQuantType.QMX.value
        10
    """

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


class ExtendedQuantFormat(_NamedEnum):
    """The nodes that quantize tensors in a graph; `QDQ` includes Quark's MX nodes.

    Example:
        >>> from pt2mx import quark
        >>> quark.ExtendedQuantFormat.QDQ.value
        1
    """

    QOperator = 0
    QDQ = 1


class VitisQuantFormat(_NamedEnum):
    """The nodes that quantize tensors in a graph, under older names; `MXFixNeuron` means MX formats for activations and
    weights.

    Example:
        >>> from pt2mx import quark
        >>> quark.VitisQuantFormat.MXFixNeuron.value
        5
    """

    QDQ = 2
    FixNeuron = 3
    BFPFixNeuron = 4
    MXFixNeuron = 5
