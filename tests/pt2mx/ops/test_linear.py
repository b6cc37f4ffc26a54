"""The operators linear_mx and grouped_linear_mx: schemas, errors, gradients, shapes, compilation."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import FORMATS, MXError, ops
from pt2mx.ops.linear import GroupedLinearMX, grouped_linear_mx, linear_mx
from tests.compare import relative_error
from tests.models import module_of
from tests.operators import opchecks


def packed(*shape: int, name: str = "fp4_e2m1", block: int = 32) -> tuple[Tensor, Tensor, str, int]:
    """data, scale and the last arguments of the operators, of a random weight of that shape."""
    scale, data = ops.quantize_mx(torch.randn(shape), name, block, -1, "floor", "even")
    return data, scale, name, block


def dequantized(
    data: Tensor, scale: Tensor, name: str, block: int, k: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    return ops.dequantize_mx(data, scale, name, block, dtype, -1, k)


@pytest.mark.diagonal
@pytest.mark.parametrize(("name", "checks"), opchecks(FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name, checks, dtype):
    data, scale, *modes = packed(9, 70, name=name)
    bias = torch.randn(9, dtype=dtype, requires_grad=True)
    x = torch.randn(2, 3, 70, dtype=dtype, requires_grad=True)
    torch.library.opcheck(linear_mx, (x, data, scale, None, *modes, 0), test_utils=checks)
    torch.library.opcheck(linear_mx, (x, data, scale, bias, *modes, 0), test_utils=checks)


@pytest.mark.compiled
def test_opcheck_grouped():
    data, scale, *modes = packed(3, 16, 64)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 64, requires_grad=True)
    torch.library.opcheck(grouped_linear_mx, (x, data, scale, offs, *modes))
    x = x.detach().bfloat16().requires_grad_()
    torch.library.opcheck(grouped_linear_mx, (x, data, scale, offs, *modes, torch.float32))


@pytest.mark.parametrize("shape", [(70,), (1, 70), (0, 70), (2, 0, 70), (2, 3, 70), (33, 70)])
def test_shapes(shape):
    data, scale, *modes = packed(9, 70)
    x, bias = torch.randn(shape), torch.randn(9)
    expected = F.linear(x, dequantized(data, scale, *modes, 70), bias)
    torch.testing.assert_close(linear_mx(x, data, scale, bias, *modes, 0), expected)


def test_nothing_to_sum():
    data, scale, *modes = packed(9, 0)
    assert not linear_mx(torch.randn(2, 0), data, scale, None, *modes, 0).any()
    bias = torch.randn(9)
    assert torch.equal(linear_mx(torch.randn(2, 0), data, scale, bias, *modes, 0), bias.expand(2, 9))
    data, scale, *modes = packed(0, 32)
    assert linear_mx(torch.randn(2, 32), data, scale, None, *modes, 0).shape == (2, 0)


def test_strided_operands():
    data, scale, *modes = packed(18, 64)
    x, bias = torch.randn(128, 5).T[:, ::2], torch.randn(18)[::2]
    expected = F.linear(x, dequantized(data, scale, *modes, 64)[::2], bias)
    torch.testing.assert_close(linear_mx(x, data[::2], scale[::2], bias, *modes, 0), expected)


@pytest.mark.parametrize("rows", [1, 40])
def test_gradient(rows):
    """That of the product with the dequantized weight, for x and bias; packed codes have none."""
    data, scale, *modes = packed(9, 70)
    x, bias = torch.randn(2, rows, 70, requires_grad=True), torch.randn(9, requires_grad=True)
    grad = torch.randn(2, rows, 9)
    linear_mx(x, data, scale, bias, *modes, 0).backward(grad)
    actual, x.grad, actual_bias, bias.grad = x.grad, None, bias.grad, None
    F.linear(x, dequantized(data, scale, *modes, 70), bias).backward(grad)
    torch.testing.assert_close(actual, x.grad)
    torch.testing.assert_close(actual_bias, bias.grad)


@pytest.mark.compiled_except("inference_mode")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_with_dynamic_shapes(compiler, mode):
    data, scale, *modes = packed(9, 70)
    f = torch.compile(lambda x: linear_mx(x.relu(), data, scale, None, *modes, 0) + 1, fullgraph=True, dynamic=True)
    with mode():
        for rows in (2, 5, 40):
            x = torch.randn(rows, 70)
            torch.testing.assert_close(f(x), F.linear(x.relu(), dequantized(data, scale, *modes, 70)) + 1)


def test_exported_with_dynamic_shapes():
    data, scale, *modes = packed(9, 70, name="fp6_e3m2")
    x = torch.randn(4, 70)
    shapes = ({0: torch.export.Dim("rows", max=64)}, None, None)
    product = module_of(lambda self, x, data, scale: linear_mx(x, data, scale, None, "fp6_e3m2", 32, 0))
    program = torch.export.export(product, (x, data, scale), dynamic_shapes=shapes)
    x = torch.randn(33, 70)
    assert torch.equal(program.module()(x, data, scale), linear_mx(x, data, scale, None, *modes, 0))


def test_meta():
    data, scale, *modes = (t.to("meta") if isinstance(t, Tensor) else t for t in packed(9, 70))
    y = linear_mx(torch.empty(3, 70, device="meta", dtype=torch.bfloat16), data, scale, None, *modes, 0)
    assert (y.shape, y.dtype, y.device.type) == ((3, 9), torch.bfloat16, "meta")


def test_grouped_is_the_product_of_each_expert():
    data, scale, *modes = packed(3, 16, 64)
    x, offs = torch.randn(50, 64).bfloat16(), torch.tensor([0, 3, 50], dtype=torch.int32)
    y = grouped_linear_mx(x, data, scale, offs, *modes)
    assert torch.equal(y[:3], linear_mx(x[:3], data[1], scale[1], None, *modes, 0))
    assert torch.equal(y[3:], linear_mx(x[3:], data[2], scale[2], None, *modes, 0))
    expected = torch._grouped_mm(x, dequantized(data, scale, *modes, 64, torch.bfloat16).transpose(1, 2), offs=offs)
    torch.testing.assert_close(y, expected)


@pytest.mark.compiled
@pytest.mark.parametrize("rows", [20, 200])
def test_grouped_values_of_bfloat16_with_a_result_in_float32(rows, compiler):
    data, scale, *modes = packed(3, 40, 96, name="fp8_e4m3")
    x, offs = torch.randn(rows, 96).bfloat16(), torch.tensor([7, 7, rows], dtype=torch.int32)
    weight = dequantized(data, scale, *modes, 96).double()
    exact = torch.cat([x[:7].double() @ weight[0].T, x[7:].double() @ weight[2].T])
    for run in (grouped_linear_mx, torch.compile(grouped_linear_mx, fullgraph=True)):
        got = run(x, data, scale, offs, *modes, torch.float32)
        assert got.dtype == torch.float32 and relative_error(got, exact) < 5e-7
    define = GroupedLinearMX.function(lambda call: call.define(call.spec, torch.float32))
    definition = define(x, data, scale, offs, *modes, torch.float32)
    assert definition.dtype == torch.float32 and relative_error(definition, exact) < 5e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_groups(dtype):
    data, scale, *modes = packed(3, 16, 64)
    x, offs = torch.randn(50, 64).to(dtype).requires_grad_(), torch.tensor([0, 3, 50], dtype=torch.int32)
    grad = torch.randn(50, 16)
    (got,) = torch.autograd.grad(grouped_linear_mx(x, data, scale, offs, *modes, torch.float32), x, grad)
    weight = dequantized(data, scale, *modes, 64)
    assert got.dtype == dtype
    torch.testing.assert_close(got, torch.cat([grad[:3] @ weight[1], grad[3:] @ weight[2]]).to(dtype))


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [16, 20])
def test_rows_of_no_expert_have_no_gradient(n, dtype, compiler):
    """Also of rows that torch's product of groups does not take, 20 of them."""
    data, scale, *modes = packed(3, n, 64)
    x, offs = torch.randn(50, 64).to(dtype), torch.tensor([0, 7, 40], dtype=torch.int32)
    weight = dequantized(data, scale, *modes, 64)
    want = torch.cat([weight[1].sum(0).expand(7, -1), weight[2].sum(0).expand(33, -1), torch.zeros(10, 64)])
    for run in (grouped_linear_mx, torch.compile(grouped_linear_mx, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        run(leaf, data, scale, offs, *modes)[:40].sum().backward()
        torch.testing.assert_close(leaf.grad, want.to(dtype), rtol=0.02, atol=0.05)
        assert not leaf.grad[40:].any()


def test_groups_round_x_to_the_result_s_dtype_first():
    """However many rows an expert has."""
    data, scale, *modes = packed(2, 16, 64)
    x, offs = torch.randn(50, 64), torch.tensor([4, 50], dtype=torch.int32)
    got = grouped_linear_mx(x, data, scale, offs, *modes, torch.bfloat16)
    assert torch.equal(got, grouped_linear_mx(x.bfloat16(), data, scale, offs, *modes))


ERRORS = {
    "K": (
        lambda x, d, s: (x[:, :60], d, s, None),
        "x of shape (2, 60) times a weight of (9, 35) bytes: data has 35 bytes along dimension 1, but 60 codes of",
    ),
    "scale": (lambda x, d, s: (x, d, s[:, :2], None), "scale of shape (9, 2) does not fit data of shape (9, 35)"),
    "0-d": (lambda x, d, s: (x[0, 0], d, s, None), "not (..., K) and 2"),
    "weight": (lambda x, d, s: (x, d[0], s[0], None), "a weight of 1 dimensions, not (..., K) and 2"),
    "dtype": (lambda x, d, s: (x.double(), d, s, None), "torch.float64: allowed are float32, float16 and bfloat16"),
    "bias shape": (
        lambda x, d, s: (x, d, s, x[0]),
        "bias of shape (70,), torch.float32 on cpu does not fit a weight of 9",
    ),
    "bias dtype": (
        lambda x, d, s: (x, d, s, torch.ones(9).half()),
        "torch.float16 on cpu does not fit a weight of 9 rows",
    ),
    "codes": (lambda x, d, s: (x, d.int(), s, None), "codes and scales are uint8, not torch.int32"),
    "device": (lambda x, d, s: (x, d.to("meta"), s.to("meta"), None), "x is on cpu and the weight on meta"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    data, scale, *modes = packed(9, 70)
    arguments, message = ERRORS[case]
    with pytest.raises(MXError, match=re.escape(message)):
        linear_mx(*arguments(torch.randn(2, 70), data, scale), *modes, 0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_a_result_has_a_dtype_of_high_precision(dtype):
    scale, data = ops.quantize_mx(torch.randn(9, 70), "fp4_e2m1", 32, -1, "floor", "even")
    ends = torch.tensor([2], dtype=torch.int32)
    with pytest.raises(MXError, match=f"target_dtype={dtype} must be float32, float16 or bfloat16"):
        linear_mx(torch.randn(2, 70), data, scale, None, "fp4_e2m1", 32, 0, dtype)
    with pytest.raises(MXError, match=f"target_dtype={dtype} must be float32, float16 or bfloat16"):
        grouped_linear_mx(torch.randn(2, 70), data[None], scale[None], ends, "fp4_e2m1", 32, dtype)


def test_errors_of_groups():
    data, scale, *modes = packed(3, 16, 64)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    for wrong in (offs[:2], offs.long(), offs.to("meta")):
        with pytest.raises(MXError, match=r"x must be \(T, K\) and offs \(3,\) int32 on cpu"):
            grouped_linear_mx(torch.randn(5, 64), data, scale, wrong, *modes)
    with pytest.raises(MXError, match=r"x must be \(T, K\) and offs"):
        grouped_linear_mx(torch.randn(1, 5, 64), data, scale, offs, *modes)


@pytest.mark.compiled
@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotated_x(dtype, rows, compiler):
    x, (*weight, name, block), bias = torch.randn(rows, 96, dtype=dtype), packed(8, 96), torch.randn(8, dtype=dtype)
    rotated = torch.ops.pt2mx.hadamard(x, 32, -1)
    want = linear_mx(rotated, *weight, bias, name, block, 0)
    assert torch.equal(linear_mx(x, *weight, bias, name, block, 32), want)
    got = torch.compile(lambda x: linear_mx(x + 0, *weight, bias, name, block, 32), fullgraph=True)(x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.library.opcheck(linear_mx, (x, *weight, bias, name, block, 32))
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_mx(x, *weight, bias, name, block, 32)
    assert torch.equal(cast, linear_mx(x.bfloat16(), *weight, bias.bfloat16(), name, block, 32))
    with pytest.raises(MXError, match="blocks of 64 do not rotate 96 values"):
        linear_mx(x, *weight, bias, name, block, 64)


def test_gradient_of_a_rotated_x():
    x, (*weight, name, block) = torch.randn(3, 64, requires_grad=True), packed(8, 64)
    grad = torch.randn(3, 8)
    (got,) = torch.autograd.grad(linear_mx(x, *weight, None, name, block, 32), x, grad)
    (want,) = torch.autograd.grad(
        linear_mx(torch.ops.pt2mx.hadamard(x, 32, -1), *weight, None, name, block, 0), x, grad
    )
    torch.testing.assert_close(got, want)
