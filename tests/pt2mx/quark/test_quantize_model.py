"""Which nodes a config of Quark selects."""

import onnx
import pytest

from pt2mx import MXError, quark
from pt2mx.quark.quantize_model import quantize_model
from tests.onnx_float_files import old_network

NAMES = ["conv1", "ConvTranspose_2", "grouped", "fc", "head"]


def quantized(tmp_path, model=None, **fields):
    onnx.save(model or old_network(18, 10), tmp_path / "float.onnx")
    config = quark.QuantizationConfig(quant_format=quark.VitisQuantFormat.MXFixNeuron, **fields)
    return quantize_model(str(tmp_path / "float.onnx"), None, config, None)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, NAMES),
        ({"op_types_to_quantize": ["Conv"]}, ["conv1", "grouped"]),
        ({"op_types_to_quantize": ["Conv"], "extra_op_types_to_quantize": ["Gemm"]}, ["conv1", "grouped", "fc"]),
        ({"extra_op_types_to_quantize": ["Gemm"]}, NAMES),
        ({"nodes_to_quantize": ["fc", "head"]}, ["fc", "head"]),
        ({"nodes_to_exclude": ["conv1"]}, NAMES[1:]),
        ({"nodes_to_exclude": ["^(conv|f).*"]}, ["ConvTranspose_2", "grouped", "head"]),
        ({"op_types_to_quantize": ["Conv"], "nodes_to_exclude": ["grouped"]}, ["conv1"]),
        ({"op_types_to_quantize": ["Conv"], "nodes_to_quantize": ["grouped", "fc"]}, ["grouped"]),
    ],
)
def test_nodes_by_type_and_name(tmp_path, fields, names):
    _, report = quantized(tmp_path, **fields)
    assert [operator.name for operator in report.operators if operator.quantized] == names
    assert [operator.name for operator in report.operators] == NAMES


def test_nodes_without_names_are_named_as_in_the_report(tmp_path):
    model = old_network(18, 10)
    for node in model.graph.node:
        node.name = ""
    _, report = quantized(tmp_path, model)
    first, *others = [operator.name for operator in report.operators]
    for pattern in (first, f"^{first}$"):
        _, report = quantized(tmp_path, model, nodes_to_exclude=[pattern])
        assert [operator.name for operator in report.operators if operator.quantized] == others
        assert report.operators[0].reason == f"nodes_to_exclude has {first!r}"
    with pytest.raises(MXError, match="nothing to quantize"):
        quantized(tmp_path, model, nodes_to_exclude=["^.*"])
    with pytest.raises(MXError, match="the model has no node ''"):
        quantized(tmp_path, model, nodes_to_exclude=[""])


def test_weights_only(tmp_path):
    model, _ = quantized(tmp_path, extra_options={"WeightsOnly": True})
    kinds = [node.op_type.partition(".")[0] for node in model.graph.node if node.domain]
    assert kinds == ["DequantizeMX"] * 5
    model, _ = quantized(tmp_path, extra_options={"MXAttributes": {"element_dtype": "fp4_e2m1", "block_size": 16}})
    attributes = [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in model.graph.node
        if node.op_type == "MXQuantizeDequantize"
    ]
    assert {(a["element_dtype"], a["block_size"]) for a in attributes} == {(b"fp4_e2m1", 16)} and len(attributes) == 5


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"op_types_to_quantize": ["Relu"]}, "op_types_to_quantize: pt2mx quantizes no operand of a 'Relu'"),
        ({"extra_op_types_to_quantize": ["conv"]}, "extra_op_types_to_quantize: .*did you mean 'Conv'"),
        ({"nodes_to_exclude": ["conv"]}, "nodes_to_exclude: the model has no node 'conv': did you mean 'conv1'"),
        ({"nodes_to_quantize": ["^x.*"]}, r"nodes_to_quantize: the model has no node '\^x\.\*'"),
        ({"nodes_to_exclude": ["^(.*"]}, "is no regular expression"),
        ({"nodes_to_exclude": NAMES[:1] + NAMES[2:], "op_types_to_quantize": ["Conv"]}, "nothing to quantize"),
    ],
)
def test_names_that_the_model_does_not_have(tmp_path, fields, match):
    with pytest.raises(MXError, match=match):
        quantized(tmp_path, **fields)
