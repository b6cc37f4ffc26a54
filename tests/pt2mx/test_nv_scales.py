"""MXFP4 becomes NVFP4 with the same codes and values, and back; what is not exact is refused by name."""

import pytest
import torch

from pt2mx import MXError, dequantize_mx, mx_to_nv_scales, nv_to_mx_scales, quantize_mx, tensor_scale_mx


def tensor(shape: tuple[int, ...], binades: int) -> torch.Tensor:
    """Blocks of 32 whose scales span that number of powers of two."""
    x = torch.rand(shape) + 0.5
    return x * torch.exp2(torch.randint(0, binades, (*shape[:-1], 1)).float() - 40)


@pytest.mark.parametrize("axis", [1, 0])
@pytest.mark.parametrize("shape", [(8, 64), (5, 72), (3, 33)])
@pytest.mark.parametrize("elem", ["mxfp4", "mxfp8", "mxfp6_e3m2", "mxint8"])
def test_values_and_bytes_are_the_same(elem, shape, axis):
    x = tensor(shape, 15)
    x = x if axis == 1 else x.T.contiguous()
    x.view(-1)[:3] = 0.0
    length = x.shape[axis]
    scale, data = quantize_mx(x, elem, axis=axis)
    form = f"{elem}{{32,{axis}}}"
    nv_scale, tensor_scale = mx_to_nv_scales(data, scale, form, length)
    nv = f"nv{elem[2:]}{{16,{axis}}}"
    assert nv_scale.shape[axis] == -(-length // 16) and tensor_scale.log2().frac() == 0
    want = dequantize_mx(data, scale, elem, axis=axis, length=length)
    assert torch.equal(dequantize_mx(data, nv_scale, nv, length=length, tensor_scale=tensor_scale), want)
    assert torch.equal(nv_to_mx_scales(data, nv_scale, tensor_scale, nv, length), scale)


def test_every_binade_that_fits():
    x = torch.exp2(torch.arange(18.0)).repeat_interleave(32)
    scale, data = quantize_mx(x, "mxfp4")
    nv_scale, tensor_scale = mx_to_nv_scales(data, scale)
    assert nv_scale.view(torch.float8_e4m3fn).float()[::2].log2().tolist() == list(range(-9, 9))
    assert torch.equal(dequantize_mx(data, nv_scale, "nvfp4", tensor_scale=tensor_scale), x)


def test_zeros_and_nan():
    x = torch.tensor([0.0] * 32 + [4.0] * 32 + [torch.nan] * 32 + [2.0**-60] * 32)
    with pytest.raises(
        MXError, match=r"no exact conversion: block \[6\] has the scale 2\*\*-62, which is not within 2\*\*-17"
    ):
        mx_to_nv_scales(*reversed(quantize_mx(x, "mxfp4")))
    scale, data = quantize_mx(x[:96], "mxfp4")
    nv_scale, tensor_scale = mx_to_nv_scales(data, scale)
    assert nv_scale.view(torch.float8_e4m3fn).float().nan_to_num(7).tolist() == [1, 1, 256, 256, 7, 7]
    assert nv_to_mx_scales(data, nv_scale, tensor_scale).tolist() == scale.tolist() == [0, 127, 255]
    scale, data = quantize_mx(torch.zeros(32), "mxfp4")
    assert mx_to_nv_scales(data, scale)[1].item() == 2.0**-8


def test_what_is_no_power_of_two_does_not_go_back():
    x = torch.randn(64)
    tensor_scale = tensor_scale_mx(x, "nvfp4")
    scale, data = quantize_mx(x, "nvfp4", tensor_scale=tensor_scale)
    with pytest.raises(MXError, match=r"block \[0\] has the scale .*, which is no power of two"):
        nv_to_mx_scales(data, scale, tensor_scale)
    scale = torch.tensor([0x38, 0x40, 0x38, 0x38], dtype=torch.uint8)  # 1, 2, 1, 1
    with pytest.raises(MXError, match=r"block \[0\] of 32 values has several scales, up to the E8M0 byte 128"):
        nv_to_mx_scales(data, scale, torch.ones(()))
    with pytest.raises(MXError, match=r"scale of shape \(4,\) .* has uint8 scales of shape \(2,\)"):
        mx_to_nv_scales(data, scale)
    with pytest.raises(MXError, match="has no E8M0 scales of blocks that consist of blocks of 16"):
        mx_to_nv_scales(data, scale, "mxfp4{24}")


@pytest.mark.parametrize("block_size", [0, "16"])
def test_arguments_that_say_nothing(block_size):
    scale, data = quantize_mx(torch.ones(64), "mxfp4")
    nv_scale, tensor_scale = mx_to_nv_scales(data, scale)
    with pytest.raises(MXError, match=r"block_size=.* must be an integer of at least 1"):
        mx_to_nv_scales(data, scale, block_size=block_size)
    with pytest.raises(MXError, match=r"block_size=.* must be an integer of at least 1"):
        nv_to_mx_scales(data, nv_scale, tensor_scale, block_size=block_size)
    with pytest.raises(MXError, match="tensor_scale must be one float32 number, not of shape"):
        mx_to_nv_scales(data, scale, tensor_scale=torch.ones(2))
    with pytest.raises(MXError, match=r"tensor_scale must be a torch\.Tensor, not float"):
        mx_to_nv_scales(data, scale, tensor_scale=0.5)
    with pytest.raises(MXError, match="tensor_scale must be one float32 number, not of shape"):
        nv_to_mx_scales(data, nv_scale, torch.ones(2))
