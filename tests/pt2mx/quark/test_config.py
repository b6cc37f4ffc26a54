import dataclasses

import pytest
from onnxruntime import quantization as onnxruntime

from pt2mx import MXError, MXSpec
from pt2mx.quark import (
    CalibrationMethod,
    Config,
    ExtendedQuantFormat,
    ExtendedQuantType,
    ModelQuantizer,
    QuantizationConfig,
    VitisQuantFormat,
    VitisQuantType,
)

MX = {"quant_format": VitisQuantFormat.MXFixNeuron}
QDQ = {"quant_format": ExtendedQuantFormat.QDQ, "activation_type": ExtendedQuantType.QMX}
#: fields that take other values than the default
HONOURED = {
    "calibrate_method", "quant_format", "activation_type", "weight_type", "op_types_to_quantize", "nodes_to_quantize",
    "extra_op_types_to_quantize", "nodes_to_exclude", "print_summary", "ignore_warnings", "extra_options",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        (MX, MXSpec("int8_full", 32, 1, rounding="half_away")),
        ({**MX, "activation_type": VitisQuantType.QMX, "weight_type": VitisQuantType.QMX}, None),
        ({**QDQ, "weight_type": ExtendedQuantType.QMX}, None),
        ({**QDQ, "quant_format": VitisQuantFormat.QDQ, "weight_type": VitisQuantType.QMX}, None),
        ({**MX, "extra_options": {"MXAttributes": {"element_dtype": "fp4_e2m1"}}}, MXSpec("fp4_e2m1", 32, 1)),
        ({**MX, "extra_options": {"UseRandomData": True, "RefineBlockAxis": True, "WeightsOnly": True}}, None),
        ({**MX, "calibrate_method": CalibrationMethod.Percentile}, None),
        ({**MX, "calibrate_method": onnxruntime.CalibrationMethod.MinMax}, None),
    ],
)
def test_what_means_an_mx_format(fields, spec):
    assert QuantizationConfig(**fields).spec() == (spec or MXSpec("int8_full", 32, 1, rounding="half_away"))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(QuantizationConfig) if f.name not in HONOURED])
def test_every_other_field_is_refused_by_name(field):
    default = getattr(QuantizationConfig(), field)
    other = not default if isinstance(default, bool) else [*default, "x"] if isinstance(default, list) else 3
    with pytest.raises(MXError, match=rf"{field}=.* is not honoured: leave it"):
        ModelQuantizer(Config(QuantizationConfig(**MX, **{field: other})))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {},
            "activation_type=<ExtendedQuantType.QInt8.* is not honoured: pt2mx quantizes to MX formats, which are QMX",
        ),
        ({"quant_format": onnxruntime.QuantFormat.QOperator}, "quant_format=.*are MXFixNeuron, QDQ here"),
        ({"quant_format": VitisQuantFormat.BFPFixNeuron}, "quant_format=<VitisQuantFormat.BFPFixNeuron"),
        ({"quant_format": "MXFixNeuron"}, "quant_format='MXFixNeuron'"),
        (QDQ, "weight_type=<ExtendedQuantType.QInt8"),
        ({**QDQ, "weight_type": onnxruntime.QuantType.QInt8}, "weight_type=<QuantType.QInt8"),
        ({**MX, "weight_type": VitisQuantType.QBFP}, "weight_type=<ExtendedQuantType.QBFP"),
        ({**MX, "calibrate_method": "MinMax"}, "calibrate_method='MinMax' is not honoured"),
        ({**MX, "extra_options": ["MXAttributes"]}, "extra_options are a dictionary"),
        ({**MX, "extra_options": {"MXAttribute": {}}}, "'MXAttribute' is not honoured: did you mean 'MXAttributes'"),
        ({**MX, "extra_options": {"AlignConcat": True}}, "'AlignConcat' is not honoured"),
        ({**MX, "extra_options": {"MXAttributes": {"axes": 1}}}, "MXAttributes have no 'axes'"),
        ({**MX, "extra_options": {"RefineBlockAxis": False}}, "'RefineBlockAxis' must be True, not False"),
        ({**MX, "extra_options": {"WeightsOnly": 1}}, "'WeightsOnly' must be False or True, not 1"),
        ({**MX, "nodes_to_exclude": "conv1"}, "nodes_to_exclude must be a list of strings"),
        ({**MX, "nodes_to_exclude": [(["a"], ["b"])]}, "nodes_to_exclude must be a list of strings"),
    ],
)
def test_refusals(fields, match):
    with pytest.raises(MXError, match=match):
        ModelQuantizer(Config(QuantizationConfig(**fields)))


@pytest.mark.parametrize(
    ("config", "kind"), [(None, "NoneType"), (QuantizationConfig(**MX), "QuantizationConfig"), (Config({}), "dict")]
)
def test_another_config(config, kind):
    with pytest.raises(
        MXError, match=rf"takes Config\(QuantizationConfig\(...\)\), both of pt2mx.quark, not a {kind}$"
    ):
        ModelQuantizer(config)
