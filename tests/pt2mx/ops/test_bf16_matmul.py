"""`matmul_bfloat16`, `attention_bfloat16`: what torch's operators give, gradients, autocast, and what they refuse."""

import re

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

import pt2mx
from pt2mx import MXError, ops
from pt2mx.ops.attention import attention_bfloat16, matmul_bfloat16
from tests.attention import NOT_QUANTIZED, attend
from tests.oracle import NARROW

_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def values(*shape, dtype=torch.float32):
    return torch.randn(shape).bfloat16().to(dtype)


def operands(dtype=torch.float32, heads=4, key_heads=2):
    query = values(2, 40, heads, 32, dtype=dtype).transpose(1, 2)
    return query, values(2, key_heads, 50, 32, dtype=dtype), values(2, key_heads, 50, 20, dtype=dtype)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(40, 64), (5, 64), (3, 40, 64), (2, 1, 3, 20, 64), (0, 64), (2, 40, 0)])
def test_matmuls_are_those_of_torch(shape, dtype):
    torch.manual_seed(0)
    x, y = values(*shape, dtype=dtype), values(*shape[:-2], shape[-1], 30, dtype=dtype)
    got = matmul_bfloat16(x, y)
    assert got.is_contiguous() and got.dtype == dtype
    torch.testing.assert_close(got, x @ y)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_attention_is_torch_s(mask, dtype):
    torch.manual_seed(0)
    given = operands(dtype)
    mask = mask and (torch.rand(40, 50) < 0.7 if mask == torch.bool else torch.randn(4, 1, 50).to(dtype))
    for rest in ((mask, False, None), (mask, False, 0.3), (None, True, None)):
        got = attend(*given, *rest)
        want = F.scaled_dot_product_attention(*given, rest[0], is_causal=rest[1], scale=rest[2], enable_gqa=True)
        assert got.dtype == dtype and got.transpose(1, 2).is_contiguous()
        # of weights in bfloat16 torch rounds others: some are those of a lesser score than the largest
        tolerance = {"rtol": 0.02, "atol": 0.01} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(got, want, **tolerance)


def test_values_that_bfloat16_does_not_hold_are_multiplied_in_float32():
    x, y = torch.randn(40, 64), torch.randn(64, 30)
    assert torch.equal(matmul_bfloat16(x, y), x @ y)
    query, key, value = torch.randn(2, 2, 40, 32), torch.randn(2, 2, 50, 32), torch.randn(2, 2, 50, 32)
    want = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(attend(query, key, value), want)


def test_results_in_float32_of_values_in_bfloat16():
    torch.manual_seed(0)
    x, y = values(3, 40, 64), values(3, 64, 30)
    given, mask = operands(), torch.randn(40, 50)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = [tensor.to(dtype) for tensor in (x, y, *given)]
        wide = [tensor.float() for tensor in narrow]
        assert torch.equal(matmul_bfloat16(*narrow[:2], torch.float32), matmul_bfloat16(*wide[:2]))
        got = attend(*narrow[2:], mask, target_dtype=torch.float32)
        assert torch.equal(got, attend(*wide[2:], mask))
    leaf = x.bfloat16().requires_grad_()
    matmul_bfloat16(leaf, y.bfloat16(), torch.float32).sum().backward()
    assert leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(leaf.grad, y.sum(-1, keepdim=True).mT.expand_as(x).bfloat16())


@pytest.mark.compiled
def test_opcheck():
    x, y = values(3, 40, 64).requires_grad_(), values(3, 64, 30).requires_grad_()
    opcheck(matmul_bfloat16, (x, y))
    given = [tensor.requires_grad_() for tensor in operands()]
    opcheck(attention_bfloat16, (*given, torch.ones(40, 50, dtype=torch.bool), False, None, None, *NOT_QUANTIZED))
    opcheck(attention_bfloat16, (*given, None, True, None, None, *NOT_QUANTIZED))
    opcheck(attention_bfloat16, (*given, None, True, None, None, "int8", 32, "floor", "even"))
    compiled = torch.compile(lambda *given: attend(*given).transpose(1, 2).reshape(2, 40, 80), fullgraph=True)
    want = attend(*given).transpose(1, 2).reshape(2, 40, 80)
    assert torch.equal(compiled(*given), want)


def test_gradients_are_torch_s():
    torch.manual_seed(0)
    added = torch.randn(1, 1, 40, 50)
    functions = (
        lambda *given: attend(*given, False, 0.2),
        lambda *given: F.scaled_dot_product_attention(*given, scale=0.2, enable_gqa=True),
    )
    results = []
    for function in functions:
        torch.manual_seed(1)
        given = [tensor.requires_grad_() for tensor in (*operands(), added.clone())]
        function(*given).pow(2).sum().backward()
        results.append([tensor.grad for tensor in given])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    x, y = values(3, 40, 64).requires_grad_(), values(3, 64, 30).requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(matmul_bfloat16(x, y).sum(), (x, y)), torch.autograd.grad((x @ y).sum(), (x, y))
    )
    query, key, value = operands()
    key.requires_grad_()  # alone
    attend(query, key, value, torch.ones(40, 50, dtype=torch.bool)).sum().backward()
    assert key.grad is not None


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("modes", [("int8", 32), ("fp4_e2m1", 16, "rceil", "half_away"), ("fp8_e4m3", 20, "mse")])
def test_quantized_attention(dtype, modes):
    given = operands(dtype)
    product = attend(*given)
    want = pt2mx.fake_quantize_mx(product.transpose(1, 2), *modes[:2], -1, *modes[2:]).transpose(1, 2)
    got = attend(*given, None, False, None, None, *modes)
    assert got.dtype == dtype and torch.equal(got, want) and got.transpose(1, 2).is_contiguous()
    got = attend(*given, elem_dtype_name=modes[0], out_dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("name", NARROW)
def test_every_element_of_a_quantized_result(name):
    query, key, value = values(2, 2, 40, 64), values(2, 2, 50, 64), values(2, 2, 50, 64)
    product = attend(query, key, value).transpose(1, 2)
    got = attend(query, key, value, elem_dtype_name=name).transpose(1, 2)
    assert torch.equal(got, ops.fake_quantize_mx(product, name, 32, -1, "floor", "even", None, "identity"))


def test_the_gradient_of_a_quantized_result_is_that_of_attention():
    results = []
    for modes in ((), (None, False, None, None, "fp8_e4m3", 32, "floor", "even", torch.bfloat16)):
        torch.manual_seed(0)
        given = [tensor.requires_grad_() for tensor in operands()]
        attend(*given, *modes).sum().backward()
        results.append([tensor.grad for tensor in given])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_dtype": torch.bfloat16}, "out_dtype=torch.bfloat16 is of a quantized result, and no element is given"),
        ({"elem_dtype_name": "fp9"}, "the result of attention: "),
        ({"elem_dtype_name": "int8", "block_size": 0}, "the result of attention: "),
        ({"elem_dtype_name": "int8", "rounding": "stochastic"}, "the result of attention: values are not rounded"),
        ({"elem_dtype_name": "int8", "out_dtype": torch.int8}, "target_dtype=torch.int8"),
    ],
)
def test_quantizations_that_are_refused(options, message):
    with pytest.raises(MXError, match=re.escape(message)):
        attend(*operands(), **options)


def test_second_derivatives_of_attention_are_errors():
    query, key, value = (tensor.requires_grad_() for tensor in operands())
    loss = attend(query, key, value).pow(2).sum() + query.pow(3).sum()
    (first,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("queries", [8, 40])
@pytest.mark.parametrize("mask", [torch.tensor(True), torch.arange(50) % 3 > 0, torch.randn(50), torch.randn(1, 50)])
def test_masks_of_any_dimensions(mask, queries):
    query, key, value = operands()
    query = query[:, :, :queries]
    want = F.scaled_dot_product_attention(query, key, value, mask.expand(1, 1, queries, 50), enable_gqa=True)
    torch.testing.assert_close(attend(query, key, value, mask), want)


def test_autocast_is_that_of_torch():
    x, y = torch.randn(40, 64), torch.randn(64, 30)
    given, added = operands(), torch.randn(40, 50)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(matmul_bfloat16(x, y), x @ y)
        got, want = attend(*given, added), F.scaled_dot_product_attention(*given, added, enable_gqa=True)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((4, 3), (4, 5), "x (4, 3) and y (4, 5) must be"),
        ((3,), (3, 5), "x (3,) and y (3, 5)"),
        ((2, 4, 3), (1, 3, 5), "x (2, 4, 3)"),
    ],
)
def test_shapes_of_matmuls(x, y, message):
    with pytest.raises(MXError, match=re.escape(message)):
        matmul_bfloat16(torch.ones(x), torch.ones(y))


def test_dtypes_of_matmuls():
    with pytest.raises(MXError, match=re.escape("operands are torch.float64 and target_dtype is None")):
        matmul_bfloat16(torch.ones(2, 2).double(), torch.ones(2, 2).double())
    with pytest.raises(MXError, match=re.escape("target_dtype is torch.int8")):
        matmul_bfloat16(torch.ones(2, 2), torch.ones(2, 2), torch.int8)
    with pytest.raises(MXError, match=re.escape("y is torch.bfloat16 on cpu and x torch.float32 on cpu")):
        matmul_bfloat16(torch.ones(2, 2), torch.ones(2, 2).bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "query (4, 40, 32), key (2, 2, 50, 32)"),
        (lambda q, k, v: (q, k[:, :, :9], v), "key (2, 2, 9, 32)"),
        (lambda q, k, v: (q[:1], k, v), "query (1, 4, 40, 32)"),
        (lambda q, k, v: (q[:, :3], k, v), "3 heads of the query must be a multiple of the 2 heads of the key"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), "4 heads of the query must be a multiple of the 0 heads"),
        (lambda q, k, v: (q, k, v.double()), "value is torch.float64"),
        (lambda q, k, v: (q, k, v, torch.ones(40, 50).int()), "the mask is torch.int32 of 2 dimensions"),
        (lambda q, k, v: (q, k, v, torch.ones(1, 2, 4, 40, 50)), "of 5 dimensions"),
        (lambda q, k, v: (q, k, v, torch.ones(40, 49)), "a mask of (40, 49) does not broadcast to (2, 4, 40, 50)"),
        (lambda q, k, v: (q, k, v, torch.ones(40, 50), True), "is_causal is true and there is a mask"),
    ],
)
def test_what_attention_refuses(change, message):
    with pytest.raises(MXError, match=re.escape(message)):
        attend(*change(*operands()))
