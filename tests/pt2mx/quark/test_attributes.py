"""Quark's dictionaries. test_golden compares with recorded results of its operator."""

import pytest
import torch

from pt2mx import MXError, MXSpec, fake_quantize_mx, quark


@pytest.mark.parametrize(
    ("attributes", "spec"),
    [
        ({}, MXSpec("int8_full", 32, 1, rounding="half_away")),
        (quark.DEFAULT_MICROSCALING_PARAMS, MXSpec("int8_full", 32, 1)),
        ({"rounding_mode": 1}, MXSpec("int8_full", 32, 1, rounding="half_up")),
        ({"element_dtype": "fp8_e5m2", "axis": -1}, MXSpec("fp8_e5m2", 32, -1)),
        ({"element_dtype": "fp8_e4m3", "rounding_mode": 0}, MXSpec("fp8_e4m3", 32, 1)),
        ({"element_dtype": "fp6_e3m2", "rounding_mode": 1}, MXSpec("fp6_e3m2", 32, 1)),
        ({"element_dtype": "fp6_e2m3", "block_size": 16}, MXSpec("fp6_e2m3", 16, 1)),
        ({**quark.DEFAULT_MICROSCALING_PARAMS, "element_dtype": "fp4_e2m1"}, MXSpec("fp4_e2m1", 32, 1)),
    ],
)
def test_dictionaries_are_specs(attributes, spec):
    assert quark.mx_spec(attributes) == spec
    x = torch.randn(2, 40, 3)
    assert torch.equal(quark.mx_quantize_dequantize(x, attributes), fake_quantize_mx(x, spec))


def test_defaults_are_those_of_the_operator():
    assert quark.MX_OP_DEFAULT_ATTRS == {"element_dtype": "int8", "axis": 1, "block_size": 32, "rounding_mode": 0}
    assert quark.DEFAULT_MICROSCALING_PARAMS["rounding_mode"] == 2


def test_a_vector_has_one_axis():
    x = torch.tensor([1.0, 3 / 128, -1.0])
    assert quark.mx_quantize_dequantize(x, {"axis": 1}).tolist() == [1.0, 2 / 64, -1.0]
    assert quark.mx_quantize_dequantize(torch.tensor(5.0), {"element_dtype": "fp4_e2m1"}).item() == 4.0


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"axes": 1}, "MXAttributes have no 'axes': did you mean 'axis'"),
        ({"element_dtype": "fp8"}, "unknown element_dtype 'fp8' in MXAttributes: did you mean"),
        ({"element_dtype": ["int8"]}, "unknown element_dtype"),
        ({"rounding_mode": 3}, "quark has no rounding_mode 3"),
        ({"block_size": 0}, "block_size=0"),
        ("int8", "are a dictionary, not 'int8'"),
    ],
)
def test_errors(attributes, match):
    with pytest.raises(MXError, match=match):
        quark.mx_spec(attributes)
    with pytest.raises(MXError, match=match):
        quark.mx_quantize_dequantize(torch.ones(2, 2), attributes)


def test_an_axis_that_is_not_there():
    with pytest.raises(MXError, match=r"axis=2 is out of range for shape \(2, 2\)"):
        quark.mx_quantize_dequantize(torch.ones(2, 2), {"axis": 2})
