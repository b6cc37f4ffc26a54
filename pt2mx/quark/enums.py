"""The enumerations that configure Quark's quantizer. A config takes members of Quark's and of onnxruntime's, too, by
their names."""

from __future__ import annotations

from enum import Enum


class CalibrationMethod(Enum):
    """The calibration methods for ranges of activations. An MX scale follows from the values of its block: every method
    gives the same file, as in Quark.

    Example:
        >>> from pt2mx import quark
        >>> quark.CalibrationMethod.MinMax.name
        'MinMax'
    """

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class ExtendedQuantType(Enum):
    """The type of activations or weights. `QMX`, an MX format, is the one that pt2mx has.

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

    def __str__(self) -> str:
        return self.name


#: the name that `ExtendedQuantType` had
VitisQuantType = ExtendedQuantType


class ExtendedQuantFormat(Enum):
    """The form in which tensors are quantized in a graph; `QDQ` includes Quark's MX nodes.

    Example:
        >>> from pt2mx import quark
        >>> quark.ExtendedQuantFormat.QDQ.value
        1
    """

    QOperator = 0
    QDQ = 1

    def __str__(self) -> str:
        return self.name


class VitisQuantFormat(Enum):
    """The form in which tensors are quantized in a graph, by older names; `MXFixNeuron` means MX formats for
    activations and weights.

    Example:
        >>> from pt2mx import quark
        >>> quark.VitisQuantFormat.MXFixNeuron.value
        5
    """

    QDQ = 2
    FixNeuron = 3
    BFPFixNeuron = 4
    MXFixNeuron = 5

    def __str__(self) -> str:
        return self.name
