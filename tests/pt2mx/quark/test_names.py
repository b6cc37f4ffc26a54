"""Every name of Quark's surface, each with a value; positions are as in Quark 0.13."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch

from pt2mx import quark


def quantizer():
    config = quark.QuantizationConfig(quark.CalibrationMethod.MinMax, quark.VitisQuantFormat.MXFixNeuron)
    return quark.ModelQuantizer(quark.Config(config))


def model_in_memory():
    graph = onnx.parser.parse_graph("net (float[N, 32] x) => (float[N, 8] y) { y = MatMul(x, w) }")
    weight = np.float32(np.arange(256).reshape(32, 8) % 7)
    graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    return quantizer().quantize_model(model, None, None, None, []).graph.node[0].op_type


NAMES = {
    "CalibrationMethod": (
        lambda: {m.name: m.value for m in quark.CalibrationMethod},
        {"MinMax": 0, "Entropy": 1, "Percentile": 2, "Distribution": 3},
    ),
    "Config": (lambda: quark.Config(quark.QuantizationConfig()).global_quant_config.include_sq, False),
    "DEFAULT_MICROSCALING_PARAMS": (lambda: quark.mx_spec(quark.DEFAULT_MICROSCALING_PARAMS).rounding, "even"),
    "ExtendedQuantFormat": (lambda: [m.name for m in quark.ExtendedQuantFormat], ["QOperator", "QDQ"]),
    "ExtendedQuantType": (lambda: (quark.ExtendedQuantType.QMX.name, quark.ExtendedQuantType(9).name), ("QMX", "QBFP")),
    "MX_OP_DEFAULT_ATTRS": (lambda: quark.mx_spec(quark.MX_OP_DEFAULT_ATTRS).rounding, "half_away"),
    "ModelQuantizer": (model_in_memory, "MXQuantizeDequantize"),
    "QuantizationConfig": (lambda: [f.name for f in dataclasses.fields(quark.QuantizationConfig)][:4], [
        "calibrate_method", "quant_format", "activation_type", "weight_type",
    ]),
    "VitisQuantFormat": (
        lambda: {m.name: m.value for m in quark.VitisQuantFormat},
        {"QDQ": 2, "FixNeuron": 3, "BFPFixNeuron": 4, "MXFixNeuron": 5},
    ),
    "VitisQuantType": (lambda: [m.value for m in quark.VitisQuantType], list(range(1, 11))),
    "mx_quantize_dequantize": (lambda: quark.mx_quantize_dequantize(torch.tensor([2.9]), {}).item(), 2.90625),
    "mx_spec": (lambda: str(quark.mx_spec({})), "mxint8_full{32}(half_away)"),
}  # fmt: skip


@pytest.mark.parametrize("name", quark.__all__)
def test_every_name_gives_its_value(name):
    call, value = NAMES[name]
    assert call() == value
