import pytest
import torch
from torch.nn import functional as F

import pt2mx
from pt2mx import MXError, ops
from pt2mx.ops.convolution import conv2d_mx


def packed(n=8, kernel=(3, 3), channels=40, name="fp4_e2m1"):
    scale, data = ops.quantize_mx(torch.randn(n, *kernel, channels), name, 32, -1, "floor", "even")
    return data, scale, ops.dequantize_mx(data, scale, name, 32, torch.float32, -1, channels).permute(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp4_e2m1", "int8", "int5", "fp9_e4m4", "int12"])
def test_values(name, dtype):
    """Elements that no unit multiplies too, and those of more than 8 bits."""
    x, (data, scale, weight), bias = torch.randn(2, 7, 6, 40).to(dtype), packed(name=name), torch.randn(8).to(dtype)
    for moves in ((1, 0, 1), ((2, 1), (1, 0), (1, 1)), ((1, 1), (2, 1), (2, 2))):
        got = conv2d_mx(x, data, scale, bias, name, 32, *moves)
        want = F.conv2d(x.float().permute(0, 3, 1, 2), weight, bias.float(), *moves).permute(0, 2, 3, 1)
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got.float(), want, rtol=0.02, atol=20 * torch.finfo(dtype).eps)


def test_gradients():
    x, (data, scale, weight) = torch.randn(2, 7, 6, 40, requires_grad=True), packed()
    bias, grad = torch.randn(8, requires_grad=True), torch.randn(2, 4, 6, 8)
    args = (data, scale, bias, "fp4_e2m1", 32, (2, 1), (1, 2), (1, 2))
    gradients = torch.autograd.grad(conv2d_mx(x, *args), (x, bias), grad)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, *args[-3:]).permute(0, 2, 3, 1)
    for got, want in zip(gradients, torch.autograd.grad(y, (x, bias), grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gradient_of_bfloat16_with_a_result_in_float32():
    x, (data, scale, _) = torch.randn(1, 5, 5, 40).bfloat16().requires_grad_(), packed()
    conv2d_mx(x, data, scale, None, "fp4_e2m1", 32, (1, 1), (0, 0), (1, 1), target_dtype=torch.float32).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad.shape == x.shape


def test_autocast():
    x, (data, scale, _) = torch.randn(1, 5, 5, 40), packed()
    with torch.autocast("cpu", torch.bfloat16):
        got = conv2d_mx(x, data, scale, torch.randn(8), "fp4_e2m1", 32, (1, 1), (0, 0), (1, 1))
    assert got.dtype == torch.bfloat16


def test_registration():
    x, (data, scale, _) = torch.randn(2, 7, 6, 40), packed()
    args = (x, data, scale, torch.randn(8), "fp4_e2m1", 32, (2, 2), (1, 1), (1, 1), None)
    torch.library.opcheck(conv2d_mx, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
def test_compiled_and_exported(tmp_path):
    """The same bits, for any batch and size."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.data, self.scale, _ = packed(64, (3, 3), 64, "int8")

        def forward(self, x):
            args = (self.data, self.scale, None, "int8", 32, (1, 1), (1, 1), (1, 1), torch.float32)
            return conv2d_mx(x, *args)

    model, shapes = Model(), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    x = ops.fake_quantize_mx(torch.randn(2, 8, 7, 64), "int8", 32, -1, "floor", "even", None, "identity").bfloat16()
    program = torch.export.export(model, (x,), dynamic_shapes=(shapes,))
    pt2mx.save_program(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    compiled, portable = torch.compile(model, dynamic=True), pt2mx.make_portable(program).module()
    for given in (x, torch.cat([x, x, x])[:, :5]):
        want = model(given)
        assert torch.equal(again(given), want) and torch.equal(compiled(given), want)
        torch.testing.assert_close(portable(given), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(5, 5, 40)}, "put the channels last"),
        ({"x": torch.randn(1, 5, 5, 42)}, "x of shape .* under a weight"),
        ({"x": torch.randn(1, 2, 5, 40)}, "smaller than a kernel"),
        ({"x": torch.randn(1, 5, 5, 40).double()}, "float64"),
        ({"bias": torch.randn(7)}, "does not fit a weight of 8 rows"),
        ({"stride": [0, 1]}, r"stride=\[0, 1\]"),
        ({"stride": [2]}, "two numbers each"),
        ({"x": torch.randn(1, 0, 5, 40), "padding": [2, 2]}, "have no pixel, channel or row"),
        ({"padding": [-1, 0]}, r"padding=\[-1, 0\]"),
        ({"target_dtype": torch.int32}, "target_dtype=torch.int32"),
    ],
)
def test_wrong_arguments(change, message):
    data, scale, _ = packed()
    given = {"x": torch.randn(1, 5, 5, 40), "weight_data": data, "weight_scale": scale, "bias": None}
    given |= {"stride": 1, "padding": 0, "dilation": 1} | change
    with pytest.raises(MXError, match=message):
        conv2d_mx(**given, elem_dtype_name="fp4_e2m1", block_size=32)
