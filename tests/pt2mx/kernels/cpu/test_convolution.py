"""The C++ kernels of conv2d_mx on each instruction set; without one, a dense convolution is computed."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import FORMATS, MXSpec, ops
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import convolution, linear
from pt2mx.ops.convolution import Conv2dMX
from tests import kernel_calls
from tests.compare import relative_error
from tests.kernel_calls import selected
from tests.threads import on_threads

ISAS = {"amx": linear.AMX, "int8": linear.INT8, "bf16": linear.AVX512_BF16, "none": 0}
#: kernel, stride, padding, dilation, size of an image
KERNELS = (
    ((3, 3), (1, 1), (1, 1), (1, 1), (9, 11)),
    ((3, 3), (2, 2), (1, 1), (1, 1), (14, 13)),
    ((1, 1), (1, 1), (0, 0), (1, 1), (5, 5)),
    ((1, 1), (2, 3), (0, 0), (1, 1), (9, 8)),
    ((1, 1), (1, 2), (1, 2), (1, 1), (4, 4)),
    ((1, 5), (2, 1), (0, 2), (1, 2), (7, 20)),
    ((7, 7), (4, 4), (3, 3), (1, 1), (20, 20)),
    ((3, 2), (1, 1), (5, 4), (2, 3), (3, 4)),
)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    """Return the name of an instruction set, and let the kernels use only that one, if the machine has it."""
    isa_for = linear.isa_for
    monkeypatch.setattr(convolution, "isa_for", lambda spec, k: isa_for(spec, k) & ISAS[request.param])
    return request.param


@pytest.fixture
def dense_calls(monkeypatch):
    calls, dense = [], Conv2dMX.define
    monkeypatch.setattr(Conv2dMX, "define", lambda *args: calls.append(1) or dense(*args))
    return calls


def packed(n, kernel, channels, name, block=32):
    scale, data = ops.quantize_mx(torch.randn(n, *kernel, channels), name, block, -1, "floor", "even")
    return data, scale, MXSpec(name, block, 3)


def quantized(shape, name):
    return ops.fake_quantize_mx(torch.randn(shape), name, 32, -1, "floor", "even", None, "identity").bfloat16()


def check(x, weight, conv_args, bias=None, dtype=torch.float32, bound=1.1):
    """Check that a convolution is no less exact than torch's own."""
    data, scale, spec = weight
    values = reference.dequantize(data, scale, spec, torch.float32, x.shape[-1]).permute(0, 3, 1, 2)
    images = x.permute(0, 3, 1, 2)
    exact = F.conv2d(images.double(), values.double(), None if bias is None else bias.double(), *conv_args)
    plain = F.conv2d(images.float(), values, None if bias is None else bias.float(), *conv_args)
    got = selected.conv2d(x, data, scale, bias, spec, *conv_args, dtype)
    assert got.is_contiguous() and got.dtype == dtype
    got, error = got.permute(0, 3, 1, 2), relative_error(plain.to(dtype), exact)
    assert got.shape == exact.shape
    assert relative_error(got, exact) <= max(bound * error, 1e-7), (spec, x.shape, conv_args)
    return got


@pytest.mark.diagonal
@pytest.mark.parametrize("kernel_case", KERNELS)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp6_e2m3"])
def test_kernels(isa, kernel_case, name):
    kernel, *conv_args, size = kernel_case
    for batch, channels, n in ((2, 64, 40), (1, 32, 64), (3, 50, 17)):
        weight, bias = packed(n, kernel, channels, name), torch.randn(n)
        check(quantized((batch, *size, channels), name), weight, conv_args, bias)


@pytest.mark.diagonal
@pytest.mark.parametrize("channels", [1, 3, 8, 21, 23])
@pytest.mark.parametrize("name", ["int8", "fp8_e5m2", "fp4_e2m1"])
def test_few_channels(isa, name, channels):
    """The taps of a row of the kernel are merged, unless the kernel has gaps."""
    for kernel, *conv_args, size in KERNELS:
        for batch, n in ((2, 40), (1, 64)):
            weight, bias = packed(n, kernel, channels, name), torch.randn(n)
            check(quantized((batch, *size, channels), name), weight, conv_args, bias)
            check(quantized((batch, *size, channels), name), weight, conv_args, None, torch.bfloat16)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0**-133])
def test_few_channels_of_unsupported_values(isa, value):
    """None of them reaches a position whose kernel does not cover it."""
    x, (data, scale, spec) = quantized((2, 6, 9, 3), "int8"), packed(40, (3, 3), 3, "int8")
    x[1, 2, 3, 1] = value
    conv_args = ((1, 2), (1, 1), (1, 1))
    got = selected.conv2d(x, data, scale, None, spec, *conv_args, torch.float32)
    plain = kernel_calls.conv2d(x, data, scale, None, spec, *conv_args, torch.float32)[0].decompose()
    assert torch.equal(got.isfinite(), plain.isfinite())
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5, equal_nan=True)
    scale[7, 1, 1, 0] = 255
    got = selected.conv2d(quantized((2, 6, 9, 3), "int8"), data, scale, None, spec, *conv_args, torch.float32)
    assert got[..., 7].isnan().all() and got.isnan().sum() == got[..., 7].numel()


@pytest.mark.parametrize("channels", [3, 64])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_an_image_s_bits_do_not_depend_on_other_images(isa, name, channels):
    """A tile has rows of several images, and skips taps that fall in the padding for all of them."""
    conv_args = ((1, 1), (2, 2), (1, 1))
    x, (data, scale, spec) = quantized((9, 7, 7, channels), name), packed(40, (5, 5), channels, name)
    together = selected.conv2d(x, data, scale, None, spec, *conv_args, torch.float32)
    for first, last in ((0, 1), (1, 4), (4, 9)):
        alone = selected.conv2d(x[first:last], data, scale, None, spec, *conv_args, torch.float32)
        if isa != "none":
            assert torch.equal(alone, together[first:last])


@pytest.mark.diagonal
@pytest.mark.parametrize("block", [32, 64, 2**20])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(isa, name, block):
    for of_x in (name, "int8", "fp8_e4m3"):
        x, weight = quantized((2, 8, 8, 96), of_x), packed(33, (3, 3), 96, name, block)
        check(x, weight, ((1, 1), (1, 1), (1, 1)))
        check(x, weight, ((1, 1), (1, 1), (1, 1)), torch.randn(33).bfloat16(), torch.bfloat16)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_many_channels_and_many_images(isa, name):
    conv_args = ((1, 1), (1, 1), (1, 1))
    check(quantized((1, 4, 4, 1100), name), packed(70, (3, 3), 1100, name), conv_args)
    check(quantized((40, 6, 7, 32), name), packed(600, (3, 3), 32, name), conv_args)
    data, scale, spec = packed(8, (3, 3), 32, name)
    none = selected.conv2d(quantized((0, 6, 7, 32), name), data, scale, None, spec, *conv_args, torch.float32)
    assert none.shape == (0, 6, 7, 8)


@pytest.mark.parametrize("channels", [3, 64])
@pytest.mark.parametrize("name", ["int8", "fp4_e2m1", "fp8_e5m2"])
def test_which_isa_is_used(isa, dense_calls, name, channels):
    """The GEMM of integers does not support few channels."""
    available = linear.isa_for(MXSpec(name, 32), channels) & ISAS[isa]
    if channels == 3:
        available &= ~linear.INT8
    check(quantized((1, 8, 8, channels), name), packed(32, (3, 3), channels, name), ((1, 1), (1, 1), (1, 1)))
    assert bool(dense_calls) != bool(available)


@pytest.mark.parametrize("value", [2.0**-20, float("inf"), float("nan"), 2.0**-133])
def test_values_without_a_code(value):
    """Another instruction set is used, or a dense convolution."""
    x, (data, scale, spec) = quantized((2, 6, 6, 64), "int8"), packed(40, (3, 3), 64, "int8")
    x[1, 2, 3, :32], x[1, 2, 3, 17] = 0, value
    if abs(value) < 1:
        x[1, 2, 3, 18] = 1
    conv_args = ((1, 1), (1, 1), (1, 1))
    got = selected.conv2d(x, data, scale, None, spec, *conv_args, torch.float32)
    plain = kernel_calls.conv2d(x, data, scale, None, spec, *conv_args, torch.float32)[0].decompose()
    assert torch.equal(got.isfinite(), plain.isfinite())
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("channels", [3, 64])
def test_weights_that_bfloat16_does_not_represent(isa, channels):
    """2**-143 times a large pixel is a normal number."""
    x = torch.full((1, 7, 7, channels), 2.0**100).bfloat16()
    data = torch.ones(40, 3, 3, channels, dtype=torch.uint8)
    scale = torch.zeros(40, 3, 3, -(-channels // 32), dtype=torch.uint8)
    spec, conv_args = MXSpec("fp8_e5m2", 32, 3), ((1, 1), (0, 0), (1, 1))
    got = selected.conv2d(x, data, scale, None, spec, *conv_args, torch.float32)
    assert torch.equal(got, torch.full_like(got, 9 * channels * 2.0**-43))


def test_zeros_around_the_image_count_as_zeros():
    """Blocks with the largest and smallest supported scales, at the border of the image."""
    for name, power in (("int8", 60), ("int8", -60), ("fp8_e4m3", 40)):
        x = (
            ops.fake_quantize_mx(torch.randn(1, 3, 3, 32), name, 32, -1, "floor", "even", None, "identity") * 2.0**power
        ).bfloat16()
        check(x, packed(20, (3, 3), 32, name), ((1, 1), (2, 2), (1, 1)))


def test_a_scale_of_nan(isa):
    x, (data, scale, spec) = quantized((1, 5, 5, 64), "int8"), packed(40, (3, 3), 64, "int8")
    scale[7, 1, 1, 1] = 255
    got = selected.conv2d(x, data, scale, None, spec, (1, 1), (1, 1), (1, 1), torch.float32)
    assert got[..., 7].isnan().all() and got.isnan().sum() == got[..., 7].numel()


def test_strided_operands(isa):
    data, scale, spec = packed(40, (3, 3), 128, "int8")
    x = quantized((2, 64, 9, 9), "int8").permute(0, 2, 3, 1)
    half = (data[..., ::2], scale[..., ::2], spec)
    check(x, half, ((1, 1), (1, 1), (1, 1)), torch.randn(80)[::2])


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_same_bits_in_every_run_with_any_threads(isa, name):
    x, (data, scale, spec) = quantized((3, 10, 10, 64), name), packed(70, (3, 3), 64, name)
    args = x, data, scale, None, spec, (1, 1), (1, 1), (1, 1), torch.float32
    results = on_threads(lambda: selected.conv2d(*args), *[1, 2] * 5)
    assert all(torch.equal(results[0], y) for y in results)
