import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from pt2mx import MXError, fake_quantize_mx, microxcaling
from pt2mx.microxcaling import ConvTranspose2d, Linear, finalize_mx_specs

SPECS = finalize_mx_specs({"w_elem_format": "fp4", "a_elem_format": "fp8_e4m3", "block_size": 8, "round": "even"})
LAYERS = {
    "Linear": ((20, 6), (3, 20), {}),
    "Conv1d": ((12, 6, 3), (2, 12, 9), {"stride": 2, "padding": "valid"}),
    "Conv2d": ((12, 6, 3), (2, 12, 9, 8), {"padding": "same", "dilation": 2}),
    "Conv3d": ((12, 6, (1, 2, 3)), (2, 12, 5, 4, 6), {"padding": (0, 1, 1), "groups": 2, "bias": False}),
    "ConvTranspose2d": (
        (12, 6, 3),
        (2, 12, 5, 4),
        {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2, "groups": 3},
    ),
}
EVERY = pytest.mark.parametrize("name", LAYERS)


def layers(name, specs):
    """The layer, torch's of the same weights, and an input."""
    sizes, shape, options = LAYERS[name]
    torch.manual_seed(0)
    layer = getattr(microxcaling, name)(*sizes, **options, mx_specs=specs, name="here")
    plain = getattr(nn, name)(*sizes, **options)
    plain.load_state_dict(layer.state_dict())
    return layer, plain, torch.randn(shape)


def with_blocks(module, x):
    """x and the weight in blocks along the input channels. Convolutions round "nearest"."""
    linear, transposed = type(module) is nn.Linear, isinstance(module, nn.ConvTranspose2d)
    rounding = "even" if linear else "half_away"
    axis = -1 if linear else 1
    weight = fake_quantize_mx(module.weight, "fp4", 8, 0 if transposed else axis, rounding=rounding)
    return fake_quantize_mx(x, "mxfp8", 8, axis, rounding=rounding), weight


@EVERY
def test_values(name):
    layer, plain, x = layers(name, SPECS)
    x_blocks, weight = with_blocks(plain, x)
    quantized = copy.deepcopy(plain)
    quantized.weight.data = weight.data
    torch.testing.assert_close(layer(x), quantized(x_blocks), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(layer(x), plain(x))
    assert isinstance(layer, getattr(nn, name)) and layer.name == "here" and not layer.mx_none


@EVERY
def test_without_specs_it_is_torchs(name):
    layer, plain, x = layers(name, None)
    assert layer.mx_none and torch.equal(layer(x), plain(x))
    layer.apply_mx_specs(SPECS)
    assert torch.equal(layer(x), layers(name, SPECS)[0](x))
    layer.apply_mx_specs(None)
    assert torch.equal(layer(x), plain(x))
    for _ in range(2):
        layer = copy.deepcopy(layer)
    assert torch.equal(layer(x), plain(x))


@EVERY
def test_training(name):
    """A step changes weight and bias by gradients near the gradients of torch's layer, or equal to them if nothing is
    quantized."""
    layer, plain, x = layers(name, SPECS)
    exact = layers(name, finalize_mx_specs({}, early_exit=False))[0]
    x.requires_grad_()
    for module, close in ((exact, 1.0), (layer, 0.98)):
        for parameter, other in zip([*module.parameters(), x], [*plain.parameters(), x], strict=True):
            (got,) = torch.autograd.grad(module(x).square().sum(), parameter)
            (want,) = torch.autograd.grad(plain(x).square().sum(), other)
            assert functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) >= close - 1e-5


def test_transposed_convolution_gradients():
    layer, plain, x = layers("ConvTranspose2d", SPECS)
    x.requires_grad_()
    y = layer(x)
    g = torch.randn(y.shape)
    grads = torch.autograd.grad(y, (x, layer.weight, layer.bias), g)
    call = (plain.stride, plain.padding, plain.output_padding, plain.groups, plain.dilation)
    q = lambda t, name, axis: fake_quantize_mx(t.detach(), name, 8, axis, rounding="half_away")  # noqa: E731
    in_x, in_w = x.detach().requires_grad_(), layer.weight.detach().requires_grad_()
    of_x = functional.conv_transpose2d(in_x, q(layer.weight, "fp4", 1), None, *call)
    of_w = functional.conv_transpose2d(q(x, "mxfp8", 0), in_w, None, *call)
    torch.testing.assert_close(grads[0], torch.autograd.grad(of_x, in_x, q(g, "mxfp8", 1))[0])
    torch.testing.assert_close(grads[1], torch.autograd.grad(of_w, in_w, q(g, "mxfp8", 0))[0])
    torch.testing.assert_close(grads[2], g.sum((0, 2, 3)))


def test_output_size():
    layer, plain, x = layers("ConvTranspose2d", SPECS)
    size = [12, 10]
    assert layer(x, output_size=size).shape == plain(x, output_size=size).shape == (2, 6, 12, 10)


def test_a_vector():
    layer, _, x = layers("Linear", SPECS)
    x = x[0].requires_grad_()
    assert torch.equal(layer(x), layer(x[None])[0])
    assert torch.autograd.grad(layer(x).sum(), x)[0].shape == (20,)


@pytest.mark.parametrize(
    ("name", "shape", "options", "match"),
    [
        ("Conv2d", (12, 9, 8), {}, r"input of shape \(12, 9, 8\) must have 4 dimensions"),
        ("ConvTranspose2d", (12, 9, 8), {}, "must have 4 dimensions"),
        ("Conv1d", (2, 12, 9), {"kernel_size": 2, "padding": "same"}, "padding='same' of a kernel of .2,. is not"),
    ],
)
def test_errors(name, shape, options, match):
    layer = getattr(microxcaling, name)(12, 6, **{"kernel_size": 3, **options}, mx_specs=SPECS)
    with pytest.raises(MXError, match=match):
        layer(torch.randn(shape))


@pytest.mark.compiled
def test_compile(compiler):
    layer = nn.Sequential(Linear(20, 6, mx_specs=SPECS), nn.ReLU())
    x = torch.randn(3, 20)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), layer(x))


def test_deepcopied_layers_have_specs_of_their_own():
    layer = ConvTranspose2d(4, 4, 1, mx_specs=SPECS)
    other = copy.deepcopy(layer)
    other.mx_specs["round"] = "floor"
    assert layer.mx_specs["round"] == "even" and SPECS["round"] == "even"
