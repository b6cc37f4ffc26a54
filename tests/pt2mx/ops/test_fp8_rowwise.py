"""`quantize_fp8_rows`, `layer_norm_fp8_rows`, `mm_fp8_rows`: schemas, shapes, errors, and what they compute."""

import re

import pytest
import torch

from pt2mx import MXError, fake_quantize_mx
from pt2mx.ops.fp8_rowwise import layer_norm_fp8_rows, mm_fp8_rows, quantize_fp8_rows


def test_opcheck():
    x = torch.randn(3, 5, 64).bfloat16()
    rows = quantize_fp8_rows(x, "fp4_e2m1", "floor", "even", "none")
    weight, scale, _ = quantize_fp8_rows(torch.randn(16, 64), "fp6_e2m3", "floor", "even", "none")
    torch.library.opcheck(quantize_fp8_rows, (x, "fp6_e3m2", "even", "even", "gelu"))
    torch.library.opcheck(layer_norm_fp8_rows, (x, x, x[0, 0], None, 1e-5, "fp4_e2m1", "floor", "even"))
    torch.library.opcheck(mm_fp8_rows, (*rows, weight, scale))
    torch.library.opcheck(mm_fp8_rows, (*rows, weight, scale, torch.randn(16).bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer(dtype):
    x, w, bias = torch.randn(7, 3, 96, dtype=dtype), torch.randn(32, 96, dtype=dtype), torch.randn(32, dtype=dtype)
    weight, scale, _ = quantize_fp8_rows(w, "fp6_e2m3", "floor", "even", "none")
    got = mm_fp8_rows(*quantize_fp8_rows(x, "fp4_e2m1", "floor", "even", "none"), weight, scale, bias)
    want = fake_quantize_mx(x, "mxfp4").double() @ fake_quantize_mx(w, "mxfp6").double().T + bias
    assert got.dtype == dtype and got.shape == (7, 3, 32)
    torch.testing.assert_close(got, want.to(dtype), rtol=1e-2, atol=1e-2)


def test_strides_of_any_kind():
    x = torch.randn(64, 6, 4).bfloat16().permute(2, 1, 0)
    for got, want in zip(
        quantize_fp8_rows(x, "fp4_e2m1", "floor", "even", "none"),
        quantize_fp8_rows(x.contiguous(), "fp4_e2m1", "floor", "even", "none"),
        strict=True,
    ):
        assert torch.equal(got, want) and got.is_contiguous()


def test_no_rows():
    rows = quantize_fp8_rows(torch.randn(0, 32), "fp4_e2m1", "floor", "even", "none")
    weight, scale, _ = quantize_fp8_rows(torch.randn(16, 32), "fp4_e2m1", "floor", "even", "none")
    assert mm_fp8_rows(*rows, weight, scale).shape == (0, 16)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (torch.ones(2, 32), "fp8_e4m3", "floor", "even", "none"),
            "'fp8_e4m3' leaves no room for scales in E4M3: allowed are fp4_e2m1",
        ),
        ((torch.ones(2, 33), "fp4_e2m1", "floor", "even", "none"), "whole blocks of 32 values; got x of shape (2, 33)"),
        ((torch.ones(()), "fp4_e2m1", "floor", "even", "none"), "got x of shape ()"),
        ((torch.ones(2, 0), "fp4_e2m1", "floor", "even", "none"), "got x of shape (2, 0)"),
        ((torch.ones(2, 32), "fp4_e2m1", "floor", "even", "tanh"), "activation='tanh' must be one of none, gelu"),
        (
            (torch.ones(2, 32), "fp4_e2m1", "floor", "stochastic", "none"),
            "not rounded 'stochastic': use fake_quantize_mx",
        ),
        (
            (torch.ones(2, 32, dtype=torch.int64), "fp4_e2m1", "floor", "even", "none"),
            "cannot quantize a tensor of dtype torch.int64",
        ),
    ],
)
def test_what_makes_no_rows(args, message):
    with pytest.raises(MXError, match=re.escape(message)):
        quantize_fp8_rows(*args)


def test_what_is_no_norm():
    x = torch.ones(2, 32)
    with pytest.raises(MXError, match=re.escape("residual (32,) torch.float32 must have the shape and the dtype of x")):
        layer_norm_fp8_rows(x, x[0], None, None, 1e-5, "fp4_e2m1", "floor", "even")
    with pytest.raises(MXError, match=re.escape("weight of torch.float16")):
        layer_norm_fp8_rows(x, None, x[0].half(), None, 1e-5, "fp4_e2m1", "floor", "even")
    with pytest.raises(MXError, match=re.escape("bias of shape (31,) must be (32,)")):
        layer_norm_fp8_rows(x, None, None, x[0, 1:], 1e-5, "fp4_e2m1", "floor", "even")


def test_what_is_no_product():
    rows = quantize_fp8_rows(torch.ones(2, 32), "fp4_e2m1", "floor", "even", "none")
    weight, scale, _ = quantize_fp8_rows(torch.ones(16, 32), "fp4_e2m1", "floor", "even", "none")
    for args, message in (
        ((rows[0].float(), *rows[1:], weight, scale), "FP8 rows are uint8 codes and float32 scales"),
        ((rows[0], rows[1][0], rows[2], weight, scale), "are no FP8 rows: pass what quantize_fp8_rows returned"),
        ((*rows, weight[:, :16], scale), "does not fit rows of 32 values: expected (N, 32) and (N, 1)"),
        ((*rows, weight[:8], scale[:8]), "multiples of 16 rows and columns, not (8, 32)"),
        ((*rows, weight, scale, torch.ones(15)), "bias (15,) torch.float32 must be (16,) in torch.float32"),
    ):
        with pytest.raises(MXError, match=re.escape(message)):
            mm_fp8_rows(*args)


@pytest.mark.compiled
def test_dynamic_rows_compile():
    weight, scale, _ = quantize_fp8_rows(torch.randn(16, 64), "fp4_e2m1", "floor", "even", "none")
    bias = torch.randn(16)

    def layer(x):
        normed, *rows = layer_norm_fp8_rows(x, None, None, None, 1e-5, "fp6_e2m3", "floor", "even")
        return mm_fp8_rows(*rows, weight, scale, bias) + normed[..., :16]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (3, 8):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x), layer(x))


def test_no_gradient_passes():
    x = torch.randn(2, 32, requires_grad=True)
    weight, scale, _ = quantize_fp8_rows(torch.randn(16, 32), "fp4_e2m1", "floor", "even", "none")
    product = mm_fp8_rows(*quantize_fp8_rows(x, "fp4_e2m1", "floor", "even", "none"), weight, scale)
    with pytest.raises(MXError, match="lower the model with unpack=False"):
        product.sum().backward()
