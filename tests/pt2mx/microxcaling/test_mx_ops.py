import pytest
import torch

from pt2mx import MXError, fake_quantize_mx
from pt2mx.microxcaling import ElemFormat, MxSpecs, quantize_mx_op
from pt2mx.microxcaling.mx_ops import element_name

X = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)).mul(3).round().div(16)  # with ties


@pytest.mark.parametrize("name", [name for name in ElemFormat.__members__ if "16" not in name])
@pytest.mark.parametrize(
    ("round", "rounding"), [("nearest", "half_away"), ("floor", "toward_zero"), ("even", "even")], ids=str
)
def test_formats_and_roundings(name, round, rounding):
    got = quantize_mx_op(X, MxSpecs(block_size=16), name.upper(), axes=[-2], round=round)
    assert torch.equal(got, fake_quantize_mx(X, name, 16, -2, rounding=rounding))
    assert torch.equal(got, quantize_mx_op(X, {}, ElemFormat[name], 16, 0, round))


def test_blocks():
    fp8 = lambda specs, **fields: quantize_mx_op(X, specs, "fp8_e4m3", axes=[-1], round="even", **fields)  # noqa: E731
    assert torch.equal(fp8({}), fake_quantize_mx(X, "mxfp8", 70))
    assert torch.equal(fp8({"block_size": 8}), fake_quantize_mx(X, "mxfp8", 8))
    assert torch.equal(fp8({"block_size": 8}, block_size=0), fake_quantize_mx(X, "mxfp8", 70))
    assert torch.equal(fp8({"shared_exp_method": "none"}), fake_quantize_mx(X, "mxfp8", 1))


def test_scales_of_few_bits():
    x = torch.tensor([[2.0**12, 1.0], [2.0**-8, 2.0**-20], [1.0, 0.5]])
    got = quantize_mx_op(x, {"scale_bits": 4}, "fp4", 2, -1)  # exponents from -7 to 7
    assert got[0].isnan().all() and got[1:].tolist() == [[2.0**-8, 0.0], [1.0, 0.5]]
    flushed = quantize_mx_op(torch.tensor([2e-39, 1e-40]), {"mx_flush_fp32_subnorms": True}, "fp8_e5m2", 2, [0])
    assert flushed.tolist() == [0.0, 0.0]


def test_dither_is_unbiased():
    x = torch.cat([torch.full((20_000,), 0.3), torch.ones(1)])
    y = quantize_mx_op(x, {}, "int4", axes=0, round="dither")[:-1]
    assert set(y.tolist()) == {0.25, 0.5} and abs(y.mean() - 0.3) < 5 * 0.1 / 20_000**0.5


def test_nothing_to_do():
    assert quantize_mx_op(X, None) is X and quantize_mx_op(X, MxSpecs(), axes=[0]) is X
    x = X.clone().requires_grad_()
    assert not quantize_mx_op(x, {}, "int8", axes=[0]).requires_grad


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (({}, "fp9", None, -1), "unknown elem_format 'fp9': did you mean"),
        (({}, 5, None, -1), "unknown elem_format 5"),
        (({}, "bf16", None, -1), "bfloat16 is no element of MX blocks: bfloat=16"),
        (({}, "fp16", None, -1), "float16 is no element"),
        (({}, "int8", None, [0, 1]), r"axes=\[0, 1\]: blocks run along one dimension"),
        (({}, "int8", None, None), "axes=None"),
        (({}, "int8", None, 2), "axis=2 is out of range"),
        (({}, "int8", -1, 1), "block_size=-1"),
        (({}, "int8", None, 1, "up"), "unknown round 'up'"),
        (({"shared_exp_method": "mean"}, "int8", None, 1), "unknown shared_exp_method 'mean': allowed: max, none"),
        (({"scale_bits": 12}, "int8", None, 1), "scale_exp_bits=12"),
        (({"blocks": 12}, "int8", None, 1), "mx_specs have no key 'blocks'"),
        ((None, "int8", None, 1), "mx_specs is None"),
    ],
)
def test_errors(arguments, match):
    with pytest.raises(MXError, match=match):
        quantize_mx_op(X, *arguments)


def test_names_are_pt2mxs():
    assert element_name("fp4_e2m1") == element_name(ElemFormat.fp4) == "fp4" and element_name("INT2") == "int2"
    assert ElemFormat.from_str("bf16") is ElemFormat.bfloat16
