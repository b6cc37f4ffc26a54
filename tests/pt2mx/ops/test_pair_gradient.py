import pytest
import torch

from pt2mx import MXError, fake_quantize_mx, ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "axis"), [((3, 41), -1), ((5, 7, 3), 1), ((), -1)])
def test_a_pair_passes_the_gradient_as_fake_quantization_does(shape, axis, dtype):
    x, weight = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)
    scale, data = ops.quantize_mx(x, "fp4_e2m1", 32, axis)
    assert not scale.requires_grad and not data.requires_grad
    length = x.shape[axis] if shape else 1
    y = ops.dequantize_mx(data, scale, "fp4_e2m1", 32, dtype, axis, length).reshape(shape)
    assert torch.equal(y, fake_quantize_mx(x, "mxfp4", axis=axis))
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_it_is_cast_to_the_dtype_of_what_was_quantized():
    x = torch.randn(2, 32, dtype=torch.bfloat16, requires_grad=True)
    scale, data = ops.quantize_mx(x, "fp8_e4m3", 32)
    ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and (x.grad == 1).all()


def test_without_a_gradient_codes_remember_nothing():
    for x, recording in ((torch.randn(2, 32), True), (torch.randn(2, 32, requires_grad=True), False)):
        with torch.set_grad_enabled(recording):
            scale, data = ops.quantize_mx(x, "fp8_e4m3", 32)
            assert not vars(data) and not ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32).requires_grad


def test_a_length_that_was_not_passed_is_asked_for():
    scale, data = ops.quantize_mx(torch.randn(2, 33, requires_grad=True), "fp4_e2m1", 32)
    with pytest.raises(MXError, match=r"gives 68 values of codes that hold 66.*pass the length"):
        ops.dequantize_mx(data, scale, "fp4_e2m1", 32, torch.float32)
    with torch.no_grad():
        assert ops.dequantize_mx(data, scale, "fp4_e2m1", 32, torch.float32).shape == (2, 34)
