"""The functions that `lower_to_aten` traces give what pt2mx's operators give, in torch's dtypes."""

import pytest
import torch

from pt2mx import ops, parse
from pt2mx.fx.targets.aten import CODE_DTYPES, SCALE_DTYPES, dequantize_native, quantize_native
from pt2mx.kernels.scaled_mm import unswizzle
from pt2mx.ops.quantization import Dequantize, Quantize

FORMATS = ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4", "mxint8", "BFP[6|8]{64}(SN)", "nvfp4", "fp8_e4m3{32}(bf16)"]


def quantized(x, text, axis):
    """Return the spec, the tensor scale, and scales and codes of x."""
    spec = parse(text, axis=axis)
    t = torch.tensor(0.01) if spec.has_tensor_scale else None
    return spec, t, *ops.quantize_mx(*Quantize(x, spec, None, t).args)


def in_torchs_dtypes(spec, scale, codes):
    return scale.view(SCALE_DTYPES[spec.scale_format.name]), codes.view(CODE_DTYPES.get(spec.element.name, codes.dtype))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("text", FORMATS)
def test_dequantizes_to_the_bit(text, axis, order):
    """Ragged blocks along any dimension, in any order in memory; one block is NaN."""
    x = torch.randn(37, 3, 70).permute(order).contiguous().permute([order.index(d) for d in range(3)])
    x[0, 0, 0] = float("inf")
    spec, t, scale, codes = quantized(x, text, axis)
    for dtype in (torch.float32, torch.bfloat16):
        expected = ops.dequantize_mx(*Dequantize(codes, scale, spec, dtype, x.shape[axis], t).args)
        native = in_torchs_dtypes(spec, scale, codes)
        y = dequantize_native(*Dequantize(native[1], native[0], spec, dtype, x.shape[axis], t).args)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("text", ["mxfp8", "mxfp8_e5m2(rceil)", "mxfp4(mse)", "nvfp4"])
def test_quantizes_to_the_bytes(text):
    x = torch.randn(5, 2, 160)
    x[0, 0, 3], x[1, 1, 40], x[2] = float("nan"), float("inf"), 2.0**-130
    spec, t, scale, codes = quantized(x, text, 2)
    native_codes, native_scale = quantize_native(*Quantize(x, spec, None, t).args)
    assert torch.equal(native_codes.view(torch.uint8), codes.flatten(0, 1))
    assert native_scale.dtype == SCALE_DTYPES[spec.scale_format.name]
    of_rows = unswizzle(native_scale.view(torch.uint8).flatten(), 10, scale.shape[2])
    assert torch.equal(of_rows, scale.flatten(0, 1))
