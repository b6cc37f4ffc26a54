"""`linear_mx_mma_layout` on the CPU, where it is what its definition says."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

import pt2mx
from pt2mx import FORMATS, MXError, MXSpec, dequantize_mx, quantize_mx
from pt2mx.kernels import float_scales, reference
from pt2mx.kernels.gpu.mma_layout import to_mma_layout
from pt2mx.ops.linear import linear_mx_mma_layout
from tests.operators import opchecks


@pytest.mark.diagonal
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("name", "checks"), opchecks([*FORMATS, "fp8_e3m4", "int8_full"]))
def test_product(name, checks, bias):
    scale, data = quantize_mx(torch.randn(20, 72), name)
    weight = to_mma_layout(data, scale, MXSpec(name))
    x = torch.randn(2, 3, 72, dtype=torch.bfloat16)
    bias = torch.randn(20, dtype=torch.bfloat16) if bias else None
    want = F.linear(x, dequantize_mx(data, scale, name, 32, torch.bfloat16, length=72), bias)
    assert torch.equal(linear_mx_mma_layout(x, *weight, bias, name, 20, 0), want)
    opcheck(linear_mx_mma_layout, (x, *weight, bias, name, 20, 0), test_utils=checks)


@pytest.mark.parametrize("spec", ["nvfp4", "fp6_e2m3{32}(e4m3)"])
def test_scales_with_a_significand(spec):
    spec, w = pt2mx.parse(spec), torch.randn(20, 72)
    t = float_scales.tensor_scale(w, spec) if spec.scale_format.tensor else None
    scale, data = reference.quantize(w, spec.replace(axis=1), tensor_scale=t)
    weight = to_mma_layout(data, scale, spec)
    x = torch.randn(3, 72).bfloat16()
    dense = reference.dequantize(data, scale, spec.replace(axis=1), torch.bfloat16, 72, tensor_scale=t)
    args = x, *weight, None, spec.element.name, 20, 0, t
    assert torch.equal(linear_mx_mma_layout(*args), F.linear(x, dense))
    opcheck(linear_mx_mma_layout, args)


def test_a_tensor_scale_without_a_significand():
    scale, data = quantize_mx(torch.randn(16, 64), "mxfp4")
    weight = to_mma_layout(data, scale, MXSpec("fp4_e2m1"))
    with pytest.raises(MXError, match="of scales with a significand only"):
        linear_mx_mma_layout(torch.ones(1, 64).bfloat16(), *weight, None, "fp4_e2m1", 16, 0, torch.tensor(1.0))


@pytest.mark.parametrize("rotation", [8, 32])
def test_a_rotated_x(rotation):
    scale, data = quantize_mx(torch.randn(20, 64), "mxfp4")
    weight = to_mma_layout(data, scale, MXSpec("fp4_e2m1"))
    x = torch.randn(3, 64).bfloat16()
    want = linear_mx_mma_layout(torch.ops.pt2mx.hadamard(x, rotation, -1), *weight, None, "fp4_e2m1", 20, 0)
    assert torch.equal(linear_mx_mma_layout(x, *weight, None, "fp4_e2m1", 20, rotation), want)
    opcheck(linear_mx_mma_layout, (x, *weight, None, "fp4_e2m1", 20, rotation))
    with pytest.raises(MXError, match="blocks of 128 do not rotate 64 values"):
        linear_mx_mma_layout(x, *weight, None, "fp4_e2m1", 20, 128)


@pytest.mark.parametrize(
    ("x", "elem", "n", "message"),
    [
        (torch.randn(2, 64), "fp8_e4m3", 16, "take bfloat16 x of at least one dimension, not torch.float32"),
        (torch.randn(2, 63).bfloat16(), "fp8_e4m3", 16, "a K that 8 divides, not 63"),
        (torch.randn(2, 64).bfloat16(), "int4", 16, "no MMA layout of 'int4': allowed are .*fp4_e2m1"),
        (torch.randn(2, 64).bfloat16(), "fp8_e4m3", 17, r"no MMA layout of a \(17, 64\) weight"),
    ],
)
def test_bad_input(x, elem, n, message):
    scale, data = quantize_mx(torch.randn(16, 64), "mxfp8")
    weight = to_mma_layout(data, scale, MXSpec("fp8_e4m3"))
    with pytest.raises(MXError, match=message):
        linear_mx_mma_layout(x, *weight, None, elem, n, 0)
