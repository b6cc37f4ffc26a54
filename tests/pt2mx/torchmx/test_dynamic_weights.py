import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.extras import without_log_warnings
from pt2mx.torchmx import MXInferenceLinear, dtypes, mx_dynamic_activation_mx_weights
from pt2mx.torchmx.mx_tensor import MXTensor

with without_log_warnings():
    from torchao.quantization import quantize_


def of_values(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight = pt2mx.fake_quantize_mx(linear.weight, "mxfp4{16}")
    return nn.functional.linear(pt2mx.fake_quantize_mx(x, "mxfp6_e2m3{8}"), weight, linear.bias)


CONFIG = {
    "weight_elem_dtype": dtypes.float4_e2m1,
    "weight_block_size": 16,
    "activation_elem_dtype": dtypes.float6_e2m3,
    "activation_block_size": 8,
}


def test_layers_are_quantized_in_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 24))
    model.append(model[2])
    layers, x = [*model], torch.randn(3, 48)
    expected = of_values(model[2], of_values(model[2], of_values(model[0], x).relu()))
    quantize_(model, mx_dynamic_activation_mx_weights(**CONFIG))
    assert torch.equal(model(x), expected) and all(a is b for a, b in zip(model, layers, strict=True))
    assert type(model[0].weight.data) is MXTensor and not model[0].weight.requires_grad


def test_a_model_that_is_a_linear_layer():
    linear, x = nn.Linear(32, 4), torch.randn(2, 32)
    expected = of_values(linear, x)
    quantize_(linear, mx_dynamic_activation_mx_weights(**CONFIG))
    assert type(linear) is MXInferenceLinear and torch.equal(linear(x), expected)


def test_defaults_and_filter():
    model = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 4))
    quantize_(model, mx_dynamic_activation_mx_weights(), lambda module, name: name == "0")
    assert type(model[1]) is nn.Linear
    config = model[0].qconfig
    assert (config.weights_config.elem_dtype, config.activations_config.elem_dtype) == (
        dtypes.float6_e3m2,
        dtypes.float8_e4m3,
    )
    assert config.weights_config.block_size == config.activations_config.block_size == 32


def test_errors():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(MXError, match="a Scaled is quantized already, or has a forward of its own"):
        quantize_(Scaled(32, 4), mx_dynamic_activation_mx_weights())
    model = nn.Linear(32, 4)
    quantize_(model, mx_dynamic_activation_mx_weights())
    with pytest.raises(MXError, match="a MXInferenceLinear is quantized already"):
        quantize_(model, mx_dynamic_activation_mx_weights(weight_block_size=16))
    with pytest.raises(MXError, match="unknown MX element format"):
        mx_dynamic_activation_mx_weights("float9")
