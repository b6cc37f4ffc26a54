"""pychop's modules against the recorded outputs of its own."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pt2mx import MXError
from pt2mx.pychop import MXAttention, MXLinear, convert_linear_to_mx, mx_quantize

RECORDED = np.load(Path(__file__).with_name("recorded.npz"))


def recorded(name):
    return torch.from_numpy(RECORDED[f"layers/{name}"])


def loaded(layer, name):
    names = [key for key in RECORDED.files if key.startswith(f"layers/{name}/")]
    layer.load_state_dict({key.rpartition("/")[2]: torch.from_numpy(RECORDED[key]) for key in names})
    return layer


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("linear", lambda: MXLinear(24, 8)),
        ("linear_e5m10", lambda: MXLinear(24, 8, True, (5, 10), "mxfp6_e3m2", 32, True, True)),
        ("attention", lambda: MXAttention(24, 3, "mxfp6_e2m3")),
    ],
)
def test_outputs_are_those_of_pychop(name, make):
    torch.testing.assert_close(loaded(make(), name)(recorded("x")), recorded(name), rtol=1e-5, atol=1e-6)


def test_attention_with_a_mask_and_other_keys():
    layer, x = loaded(MXAttention(24, 3, "mxfp6_e2m3"), "attention"), recorded("x")
    mask = torch.full((5, 5), -torch.inf).triu(1)
    torch.testing.assert_close(layer(x, attn_mask=mask), recorded("masked"), rtol=1e-5, atol=1e-6)
    assert torch.equal(layer(x, x, x), layer(x)) and layer(x, x[:, :3], x[:, :3]).shape == x.shape


def test_layers_train_straight_through():
    layer, x = MXLinear(24, 8, weight_format="mxfp4_e2m1"), recorded("x").requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(x.grad[0, 0], mx_quantize(layer.weight, "mxfp4_e2m1").sum(0), atol=1e-6)
    assert layer.weight.grad.shape == (8, 24)


def test_convert_keeps_parameters_mode_and_ties():
    model = nn.Sequential(
        nn.Linear(24, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 24, bias=False), nn.Dropout())
    ).eval()
    model.append(nn.Linear(24, 16))
    model[3].weight = model[0].weight
    expected = copy.deepcopy(model)
    converted = convert_linear_to_mx(model, (3, 2), 16, True, False, False)
    assert not any(isinstance(m, MXLinear) for m in model.modules())  # a copy
    assert [type(m) for m in (converted[0], converted[2][0])] == [MXLinear] * 2
    assert converted[3].weight is converted[0].weight and not converted[0].training
    x = recorded("x")
    weight = mx_quantize(model[0].weight, (3, 2), 16)
    assert torch.equal(converted[0](x), nn.functional.linear(mx_quantize(x, (3, 2), 16), weight, model[0].bias))
    assert convert_linear_to_mx(model) is model and isinstance(model[0], MXLinear)
    model.load_state_dict(expected.state_dict())


def test_convert_of_a_layer_by_itself():
    layer = nn.Linear(4, 4).double()
    converted = convert_linear_to_mx(layer, "mxint8")
    assert isinstance(converted, MXLinear) and converted.weight is layer.weight
    assert converted(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64
    assert convert_linear_to_mx(converted) is converted


@pytest.mark.compiled
def test_a_layer_compiles(compiler):
    layer, x = loaded(MXLinear(24, 8), "linear").requires_grad_(False), recorded("x")
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-5, atol=1e-5)


def test_bad_arguments():
    with pytest.raises(MXError, match="embed_dim=24 must be a multiple of num_heads=5"):
        MXAttention(24, 5)
    with pytest.raises(MXError, match="expected a torch module, not str"):
        convert_linear_to_mx("model")
    with pytest.raises(MXError, match="unknown format 'mxfp3'"):
        MXLinear(4, 4, weight_format="mxfp3")
    with pytest.raises(MXError, match="must be a multiple of num_heads=a"):
        MXAttention(64, "a")
