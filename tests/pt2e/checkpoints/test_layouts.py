import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

import pt2mx
from pt2mx import MXError, MXSpec
from pt2mx.pt2e.checkpoints.configs import write_config
from pt2mx.pt2e.checkpoints.layouts import LAYOUTS
from pt2mx.pt2e.checkpoints.module_schemes import Module, Scheme

COMPRESSED = LAYOUTS["compressed-tensors"]


def group_of(element, inputs=None):
    """Return the group of compressed-tensors that our configuration means for a layer."""
    config = write_config(COMPRESSED, {"fc": Module("Linear", Scheme(element, inputs))})
    return QuantizationScheme.model_validate(config["config_groups"]["group_0"])


@pytest.mark.parametrize("element", list(COMPRESSED.stored))
def test_bytes_are_those_of_compressed_tensors_own_compressor(element):
    weight = torch.randn(48, 96, dtype=torch.bfloat16) * torch.randn(48, 1).exp2().bfloat16()
    scale, data = pt2mx.quantize_mx(weight, element, scale_mode="even")
    if element == "fp4_e2m1":  # compressed-tensors' compressor loses the sign of zero in FP4
        low, high = (code.where(code != 8, 0) for code in (data & 15, data >> 4))
        data = low | high << 4
    values = pt2mx.dequantize_mx(data, scale, element, target_dtype=torch.bfloat16)
    group = group_of(element)
    state = {"weight": values, "weight_scale": (scale.float() - 127).exp2().bfloat16()}
    expected = BaseCompressor.get_value_from_registry(group.format).compress(state, group)
    result = COMPRESSED.to_tensors("weight", element, data, scale)
    assert result.keys() == expected.keys()
    for name, tensor in result.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
    back = COMPRESSED.from_tensors("weight", element, expected)
    assert torch.equal(back[0], data) and torch.equal(back[1], scale)


@pytest.mark.parametrize("element", list(COMPRESSED.inputs))
def test_inputs_are_quantized_as_compressed_tensors_does(element):
    """All bits are equal except in FP8 blocks with largest value 1.75 * 2**e, whose scale is twice ours."""
    (mode,) = COMPRESSED.inputs[element]
    x = torch.randn(2000, 64, dtype=torch.bfloat16) * torch.randint(-20, 20, (2000, 1)).float().exp2().bfloat16()
    x[0] = 0
    arguments = group_of("fp4_e2m1", MXSpec(element, scale_mode=mode)).input_activations
    scale, zero = compute_dynamic_scales_and_zp(x, arguments, torch.nn.Identity())
    expected = fake_quantize(x, scale, zero, arguments).unflatten(-1, (-1, 32))
    result = pt2mx.fake_quantize_mx(x, element, scale_mode=mode).unflatten(-1, (-1, 32))
    other = (result != expected).any(-1)
    amax = x.unflatten(-1, (-1, 32)).abs().amax(-1)
    odd = (amax.float().frexp().mantissa == 0.875) & torch.tensor(element == "fp8_e4m3")
    assert not (other & ~odd).any() and bool(odd.any()) == (element == "fp8_e4m3")


@pytest.mark.parametrize(
    ("layout", "element"), [(name, element) for name in LAYOUTS for element in LAYOUTS[name].stored]
)
def test_to_tensors_and_back(layout, element):
    scale, data = pt2mx.quantize_mx(torch.randn(3, 8, 64), element)
    tensors = LAYOUTS[layout].to_tensors("experts.down_proj", element, data, scale)
    assert all(
        tensor.untyped_storage().data_ptr() in (data.data_ptr(), scale.data_ptr()) for tensor in tensors.values()
    )
    back = LAYOUTS[layout].from_tensors("experts.down_proj", element, tensors)
    assert torch.equal(back[0], data) and torch.equal(back[1], scale)


def test_what_cannot_be_held():
    scale, data = pt2mx.quantize_mx(torch.randn(4, 40), "fp4_e2m1")
    with pytest.raises(MXError, match=r"w has codes of shape \(4, 20\) and scales of shape \(4, 2\)"):
        COMPRESSED.to_tensors("w", "fp4_e2m1", data, scale)
    with pytest.raises(MXError, match=r"cannot hold w in fp6_e3m2: it has .*; quark can"):
        COMPRESSED.to_tensors("w", "fp6_e3m2", data, scale)
    scale, data = pt2mx.quantize_mx(torch.full((4, 32), float("nan")), "fp4_e2m1")
    with pytest.raises(MXError, match="w has blocks that are NaN"):
        COMPRESSED.to_tensors("w", "fp4_e2m1", data, scale)
