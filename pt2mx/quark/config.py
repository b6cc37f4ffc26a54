"""Quark's `Config` and `QuantizationConfig`: the fields that pt2mx supports, and errors for the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pt2mx.errors import MXError, nearest
from pt2mx.quark.attributes import (
    MX_OP_DEFAULT_ATTRS,
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    mx_spec,
)
from pt2mx.spec import MXSpec

#: the fields that take other values than the default
_HONOURED = {
    *("calibrate_method", "quant_format", "activation_type", "weight_type", "op_types_to_quantize"),
    *("extra_op_types_to_quantize", "nodes_to_quantize", "nodes_to_exclude", "extra_options"),
    *("print_summary", "ignore_warnings"),  # they change nothing
}
#: extra option -> the values that pt2mx takes, None for any
_EXTRA_OPTIONS: dict[str, tuple | None] = {
    "MXAttributes": None,
    "WeightsOnly": (False, True),
    "UseRandomData": (False, True),  # calibration data do not affect an MX file
    "RefineBlockAxis": (True,),
}
_CALIBRATION = (*CalibrationMethod.__members__, "NonOverflow", "MinMSE", "LayerWisePercentile")


@dataclass
class QuantizationConfig:
    """Quark's `QuantizationConfig` for MX formats. A `ModelQuantizer` rejects the settings that pt2mx does not support.
    Unlike in Quark, `include_cle` is false by default.

    MX formats are `quant_format=VitisQuantFormat.MXFixNeuron`, or `ExtendedQuantFormat.QDQ` with the type `QMX` twice.
    `extra_options` takes `MXAttributes`, as `mx_spec` does (each node sets the axis, as Quark's `RefineBlockAxis`
    does), and `WeightsOnly`. `calibrate_method` and `UseRandomData` change nothing: an MX scale follows from the values
    of its block. Empty lists of types and nodes select all; names of nodes are also patterns that begin with "^".
    """

    calibrate_method: Enum = CalibrationMethod.MinMax
    quant_format: Enum = ExtendedQuantFormat.QDQ
    activation_type: Enum = ExtendedQuantType.QInt8
    weight_type: Enum = ExtendedQuantType.QInt8

    input_nodes: list[str] = field(default_factory=list)
    output_nodes: list[str] = field(default_factory=list)
    op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_quantize: list[str] = field(default_factory=list)
    extra_op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    subgraphs_to_exclude: list[tuple[list[str]]] = field(default_factory=list)

    specific_tensor_precision: bool = False
    execution_providers: list[str] = field(default_factory=lambda: ["CPUExecutionProvider"])

    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_dynamic_quant: bool = False
    use_external_data_format: bool = False

    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False

    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = False
    include_auto_mp: bool = False
    include_fast_ft: bool = False

    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False

    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: None = None

    extra_options: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> MXSpec:
        """Return the format of activations and weights, the spec of `MXAttributes`.

        Raises:
            MXError: for a field or an extra option that pt2mx does not support; the error names it.
        """
        for name, value in vars(self).items():
            if name not in _HONOURED and value != _default(name):
                raise MXError(f"{name}={value!r} is not honoured: leave it {_default(name)!r}")
        _check_member("calibrate_method", self.calibrate_method, _CALIBRATION)
        self._check_types()
        if not isinstance(self.extra_options, dict):
            raise MXError(f"extra_options are a dictionary, not {self.extra_options!r}")
        for name, value in self.extra_options.items():
            if name not in _EXTRA_OPTIONS:
                raise MXError(f"the extra option {name!r} is not honoured: {nearest(name, _EXTRA_OPTIONS)}")
            allowed = _EXTRA_OPTIONS[name]
            if allowed is not None and not (isinstance(value, bool) and value in allowed):
                raise MXError(f"the extra option {name!r} must be {' or '.join(map(str, allowed))}, not {value!r}")
        for name in ("op_types_to_quantize", "extra_op_types_to_quantize", "nodes_to_quantize", "nodes_to_exclude"):
            names = getattr(self, name)
            if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
                raise MXError(f"{name} must be a list of strings, not {names!r}")
        return mx_spec(self.extra_options.get("MXAttributes", MX_OP_DEFAULT_ATTRS))

    def _check_types(self) -> None:
        formats = ("MXFixNeuron", "QDQ")
        form = _check_member("quant_format", self.quant_format, formats)
        for name in ("activation_type", "weight_type"):
            # as in Quark, the format decides; the user did not set the default
            taken = ("QMX", _default(name).name) if form == "MXFixNeuron" else ("QMX",)
            _check_member(name, getattr(self, name), taken)


@dataclass
class Config:
    """Quark's `Config`."""

    global_quant_config: QuantizationConfig


def _default(name: str) -> Any:
    declared = QuantizationConfig.__dataclass_fields__[name]
    return declared.default if declared.default_factory is dataclasses.MISSING else declared.default_factory()


def _check_member(name: str, value: object, allowed: Sequence[str]) -> str:
    """Return the name of a member of an enumeration, one of `allowed`."""
    member = value.name if isinstance(value, Enum) else None
    if member not in allowed:
        raise MXError(
            f"{name}={value!r} is not honoured: pt2mx quantizes to MX formats, which are {', '.join(allowed)} here"
        )
    return str(member)
