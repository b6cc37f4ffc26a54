import pytest
import torch
from torch._subclasses import FakeTensorMode
from torchao.prototype.mx_formats.utils import to_blocked

import pt2mx
from pt2mx import MXError
from pt2mx.kernels.gpu import scaled_mm as gpu
from pt2mx.kernels.scaled_mm import FORMS, swizzle, unswizzle
from pt2mx.ops.scaled_mm import ScaledMM, scaled_mm_mx, swizzle_scale

SHAPES = [(1, 1), (128, 4), (300, 7), (5, 130), (256, 8), (127, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzle_is_that_of_torchao_and_can_be_undone(shape):
    scale = torch.randint(256, shape, dtype=torch.uint8)
    swizzled = swizzle(scale)
    assert torch.equal(swizzled, to_blocked(scale))
    assert torch.equal(unswizzle(swizzled, *shape), scale)
    assert torch.equal(swizzle_scale(scale), swizzled)


def test_swizzle_by_hand():
    """Row 32 * q + r and column c of the second tile of rows go to 512 + 16 * r + 4 * q + c."""
    scale = torch.zeros(256, 4, dtype=torch.uint8)
    scale[128 + 32 * 3 + 5, 2] = 9
    assert swizzle(scale).nonzero().flatten().tolist() == [512 + 16 * 5 + 4 * 3 + 2]


def operands(x_elem, weight_elem, shape=(3, 5), n=48, k=160, dtype=torch.bfloat16):
    x, weight = torch.randn(*shape, k).to(dtype), torch.randn(n, k).to(dtype)
    (x_scale, x_data), (w_scale, w_data) = pt2mx.quantize_mx(x, x_elem), pt2mx.quantize_mx(weight, weight_elem)
    bias = torch.randn(n).to(dtype)
    dense = [pt2mx.fake_quantize_mx(t, elem).double() for t, elem in ((x, x_elem), (weight, weight_elem))]
    return (x_data, swizzle(x_scale), w_data, swizzle(w_scale), bias, x_elem, weight_elem, dtype), dense


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (200,)])
def test_emulation_is_the_product_of_the_dequantized_values(form, shape):
    for dtype in FORMS[form].results:
        args, (x, weight) = operands(*form, shape, dtype=dtype)
        got = scaled_mm_mx(*args)
        want = x @ weight.t() + args[4].double()
        assert got.dtype == dtype and got.shape == (*shape, 48)
        torch.testing.assert_close(got, want.to(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_torch_takes_the_operands_on_a_gpu(form):
    """The shapes, strides, dtypes and swizzles that torch's operator asks for: no GPU is needed to know them. Of two
    FP4 tensors its fake kernel (torch 2.13) takes K for half of what it is, which the filled scales of K = 128 hide."""
    for dtype in FORMS[form].results:
        for shape in ((3, 5), (1,), (128,)):
            args, _ = operands(*form, shape, k=128, dtype=dtype)
            with FakeTensorMode(allow_non_fake_inputs=True):
                fake = [torch.empty(a.shape, dtype=a.dtype, device="cuda") for a in args[:5]]
                fake[0] = fake[0].reshape(-1, fake[0].shape[-1])
                for bias in (fake[4], None):
                    y = gpu.matmul(ScaledMM(*fake[:4], bias, *form, dtype))
                    assert (y.shape, y.dtype, y.device.type) == ((len(fake[0]), 48), dtype, "cuda")
                short = torch.empty(args[1].numel() - 16, dtype=torch.uint8, device="cuda")
                with pytest.raises((RuntimeError, ValueError), match="scale_a"):
                    gpu.matmul(ScaledMM(fake[0], short, *fake[2:4], None, *form, dtype))


def test_operator_is_sound():
    args, _ = operands("fp8_e4m3", "fp8_e5m2")
    torch.library.opcheck(scaled_mm_mx, args)
    torch.library.opcheck(scaled_mm_mx, (*args[:4], None, *args[5:]))


def test_what_tensor_cores_do_not_take():
    args, _ = operands("fp8_e4m3", "fp8_e4m3")
    with pytest.raises(MXError, match="do not multiply fp8_e5m2 x fp8_e5m2"):
        scaled_mm_mx(*args[:5], "fp8_e5m2", "fp8_e5m2", torch.bfloat16)
    with pytest.raises(MXError, match=r"to torch\.float32"):
        scaled_mm_mx(*args[:5], "fp4_e2m1", "fp4_e2m1", torch.float32)
    with pytest.raises(MXError, match="a multiple of 32 and N of 16"):
        scaled_mm_mx(*args[:2], args[2][:40], *args[3:])
