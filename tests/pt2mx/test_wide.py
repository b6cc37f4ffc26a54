"""Elements of more than 8 bits wherever codes go: two little-endian bytes each, by the reference kernel."""

import pytest
import torch

from pt2mx import MXTensor, dequantize_mx, fake_quantize_mx, ops, quantize_mx
from pt2mx.ops.linear import linear_mx

NAMES = ("int16", "int12_full", "fp16_e5m10", "fp16_e7m8", "fp9_e4m4")


def values(*shape):
    """Ordinary rows, tiny and huge ones."""
    return torch.randn(shape) * torch.tensor([1.0, 1e-42, 1e37])[torch.arange(shape[0]) % 3].view(
        -1, *[1] * (len(shape) - 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_two_bytes_a_code(name, dtype):
    for shape, axis in (((7, 70), 1), ((70, 7), 0), ((2, 33, 3), 1)):
        x = values(*shape).clamp(-6e4, 6e4).to(dtype)
        scale, data = quantize_mx(x, name, axis=axis)
        n = shape[axis]
        assert (data.shape[axis], scale.shape[axis]) == (2 * n, -(-n // 32)) and data.dtype == torch.uint8
        back = dequantize_mx(data, scale, name, target_dtype=dtype, axis=axis)
        assert torch.equal(back, fake_quantize_mx(x, name, axis=axis))


def test_int16_codes_are_those_of_torch():
    x = torch.tensor([1.0, -1.0, 0.5 + 2**-14, -(2.0**-14)])
    scale, data = quantize_mx(x, "int16")
    assert scale.tolist() == [127] and data.view(torch.int16).tolist() == [1 << 14, -(1 << 14), (1 << 13) + 1, -1]


def test_e5m10_codes_are_those_of_float16():
    x = torch.tensor([1.5, -0.25, 2.0**-24, 40000.0, 65536.0])
    _, data = quantize_mx(x, "fp16_e5m10")
    assert torch.equal(data.view(torch.float16)[:4].float(), x[:4])
    assert data.view(torch.int16)[4].item() == 0x7C00  # Inf of float16, here the least number of the last binade


@pytest.mark.compiled
def test_compiled_code_gives_the_same_bits(compiler):
    """Of the elements that `test_inductor_cpu` rounds and decodes one by one."""

    def run(x):
        scale, data = quantize_mx(x, "int16", axis=1)
        return scale, data, dequantize_mx(data, scale, "int16", axis=1), fake_quantize_mx(x, "fp16_e5m10", axis=1)

    x = values(6, 40, 3)
    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_operators_pass_the_checks_of_torch():
    x = torch.randn(3, 40)
    scale, data = quantize_mx(x, "int16")
    torch.library.opcheck(ops.quantize_mx, (x, "int16", 32, -1, "floor", "even"))
    torch.library.opcheck(ops.dequantize_mx, (data, scale, "int16", 32, torch.float32, -1))
    torch.library.opcheck(
        ops.fake_quantize_mx, (x.requires_grad_(), "fp16_e5m10", 32, -1, "floor", "even", None, "identity")
    )


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_wide_codes(name):
    x, w = torch.randn(8, 64), torch.randn(5, 64)
    t, weight = MXTensor.to_mx(x, name, 16), MXTensor.to_mx(w, name, 16)
    plain = t.to_dtype()
    assert torch.equal(plain, fake_quantize_mx(x, name, 16)) and t.qdata.shape == (8, 128)
    for view in (lambda v: v.t(), lambda v: v.view(4, 2, 64), lambda v: v[:, 16:48], lambda v: v[1:3].unsqueeze(0)):
        assert torch.equal(view(t).to_dtype(), view(plain))
    y = torch.nn.functional.linear(plain, weight.to_dtype())
    assert torch.equal(torch.nn.functional.linear(t, weight), y)
    packed = linear_mx(plain, weight.qdata, weight.scale, None, name, 16, 0)
    assert torch.allclose(packed, y, rtol=1e-5, atol=1e-4)
