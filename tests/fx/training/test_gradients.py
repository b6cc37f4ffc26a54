"""The quantized gradients of each operator: equal to microxcaling's and TorchMX's to the bit, close to autograd's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer, fake_quantize_mx, microxcaling
from pt2mx.torchmx.mx_tensor import MXTensor, NoopFwToMXBw
from tests.compare import relative_error, same
from tests.models import module_of

#: 16 bits for each value
FINE = "int16{1}"


def call(function, *parameters):
    """Return a function of its inputs; those after the first are parameters."""
    return module_of(lambda self, x: function(x, *self.tensors), tensors=nn.ParameterList(parameters))


def attention(**how):
    return lambda q, *rest: functional.scaled_dot_product_attention(q, *rest, **how)


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


_SEEN = numbers(9, 7) > -0.5
#: name -> (model, shape of its input); 13, 33, 41, 70 are no multiples of the block size
OPERATORS = {
    "linear": (nn.Linear(70, 33), (2, 41, 70)),
    "linear of a vector": (nn.Linear(70, 33, bias=False), (70,)),
    "addmm": (call(lambda x, w, b: torch.addmm(b, x, w, beta=2, alpha=0.5), numbers(20, 13), numbers(13)), (5, 20)),
    "mm": (call(torch.mm, numbers(20, 13)), (5, 20)),
    "bmm": (call(torch.bmm, numbers(2, 70, 33)), (2, 41, 70)),
    "matmul": (call(torch.matmul, numbers(3, 1, 70, 33)), (2, 41, 70)),
    "matmul by a matrix": (call(torch.matmul, numbers(70, 33)), (2, 3, 41, 70)),
    "baddbmm": (
        call(lambda x, w, b: torch.baddbmm(b, x, w, alpha=0.5), numbers(2, 20, 13), numbers(5, 1)),
        (2, 5, 20),
    ),
    "conv1d": (nn.Conv1d(12, 6, 3, stride=2, padding="valid"), (2, 12, 9)),
    "conv2d": (nn.Conv2d(33, 40, 3, padding="same", dilation=2), (34, 33, 5, 6)),
    "conv2d, no batch": (nn.Conv2d(6, 8, 3, padding=1, bias=False), (6, 5, 7)),
    "conv2d, depthwise": (nn.Conv2d(6, 6, 3, groups=6), (2, 6, 5, 7)),
    "conv3d": (nn.Conv3d(12, 6, (1, 2, 3), padding=(0, 1, 1), groups=2), (2, 12, 5, 4, 6)),
    "transposed": (nn.ConvTranspose2d(12, 6, 3, 2, 1, output_padding=1, dilation=2, groups=3), (2, 12, 5, 4)),
    "transposed, one group": (nn.ConvTranspose1d(12, 6, 3), (2, 12, 5)),
    "attention": (call(attention(is_causal=True), numbers(2, 3, 7, 8), numbers(2, 3, 7, 5)), (2, 3, 9, 8)),
    "attention, learned mask": (
        call(lambda q, k, v, m: attention(scale=0.7)(q, k, v, m), numbers(7, 8), numbers(7, 8), numbers(1, 9, 7)),
        (2, 9, 8),
    ),
    "attention, shared heads": (
        call(attention(enable_gqa=True, attn_mask=_SEEN), numbers(2, 2, 7, 8), numbers(2, 2, 7, 8)),
        (2, 6, 9, 8),
    ),
}
EVERY = pytest.mark.parametrize("name", OPERATORS)


def prepared(model, x, **config):
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(**config))
    return pt2mx.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), quantizer)


def gradients(function, x, model):
    """The result, then the gradients of x and the parameters of `model`."""
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], weights)]


@pytest.mark.diagonal
@EVERY
@pytest.mark.parametrize("rotation", [1, 8])
def test_fine_formats_give_autograds_gradients(name, rotation):
    model, shape = OPERATORS[name]
    x = numbers(*shape)
    qat = prepared(model, x, activation=FINE, weight=FINE, gradient=FINE, gradient_hadamard=rotation)
    want, got = gradients(model, x, model), gradients(qat, x, qat)
    assert len(got) == 2 + len(list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and relative_error(a, b) < 3e-4


@pytest.mark.compiled_except("linear", "addmm", "bmm", "conv2d", "transposed", "attention, shared heads")
@EVERY
def test_the_forward_pass_keeps_its_bits(name):
    model, shape = OPERATORS[name]
    formats, x = {"activation": "mxfp8", "weight": "mxfp4"}, numbers(*shape)
    plain = gradients(prepared(model, x, **formats), x, model := prepared(model, x, **formats))
    quantized = gradients(qat := prepared(OPERATORS[name][0], x, gradient="mxfp4", **formats), x, qat)
    assert same(quantized[0], plain[0]) and not torch.equal(quantized[1], plain[1])


MICROXCALING = {
    "linear": lambda m, x, specs: microxcaling.linear(x, m.weight, m.bias, specs),
    "linear of a vector": lambda m, x, specs: microxcaling.linear(x, m.weight, m.bias, specs),
    "bmm": lambda m, x, specs: microxcaling.bmm(x, *m.tensors, specs),
    "matmul": lambda m, x, specs: microxcaling.matmul(x, *m.tensors, mx_specs=specs, mode_config="aw"),
    "matmul by a matrix": lambda m, x, specs: microxcaling.matmul(x, *m.tensors, mx_specs=specs, mode_config="aw"),
    "conv1d": lambda m, x, specs: microxcaling.conv1d(x, m.weight, m.bias, m.stride, mx_specs=specs),
    "conv2d": lambda m, x, specs: microxcaling.conv2d(x, m.weight, m.bias, 1, "same", 2, mx_specs=specs),
    "conv3d": lambda m, x, specs: microxcaling.conv3d(x, m.weight, m.bias, 1, m.padding, 1, 2, specs),
    "transposed": lambda m, x, specs: _transposed(m, specs)(x),
}


def _transposed(m, specs):
    layer = microxcaling.ConvTranspose2d(12, 6, 3, 2, 1, 1, dilation=2, groups=3, mx_specs=specs)
    layer.weight, layer.bias = m.weight, m.bias
    return layer


@pytest.mark.parametrize("name", MICROXCALING)
def test_microxcaling_to_the_bit(name):
    """Its convolutions round to nearest and have no format of the gradient; `bmm` has no weight."""
    model, shape = OPERATORS[name]
    x, is_linear = numbers(*shape), name.startswith("linear")
    rounding = "even" if is_linear else "half_away"
    weight = "mxfp8" if name == "bmm" else "mxfp4"
    of_gradient = "fp6_e3m2" if is_linear else "fp8_e4m3"
    keys = {"a_elem_format_bp_os": of_gradient, "a_elem_format_bp_ex": of_gradient, "block_size": 32}
    specs = microxcaling.finalize_mx_specs({
        "w_elem_format": "fp4", "a_elem_format": "fp8_e4m3", "round": "even" if is_linear else "nearest", **keys
    })  # fmt: skip
    formats = {"activation": "mxfp8", "weight": weight, "gradient": of_gradient}
    qat = prepared(model, x, **{role: pt2mx.parse(f, rounding=rounding) for role, f in formats.items()})
    theirs = gradients(lambda x: MICROXCALING[name](model, x, specs), x, model)
    for ours, reference in zip(gradients(qat, x, qat), theirs, strict=True):
        assert same(ours, reference)


def test_torchmx_to_the_bit():
    """Its one quantized gradient, along the last dimension, enters both products, with the operands of the forward
    pass: those are ours along any dimension in blocks of one value, and ours of x where the weight is not quantized."""
    model, x = nn.Linear(40, 24, bias=False), numbers(33, 40)
    ours = gradients(qat := prepared(model, x, activation="mxfp8{1}", weight="mxfp4{1}", gradient="mxfp4{1}"), x, qat)

    def linear(x):
        weight = MXTensor.to_mx(model.weight, "fp4_e2m1", 1)
        return NoopFwToMXBw.apply(functional.linear(MXTensor.to_mx(x, "fp8_e4m3", 1), weight), "fp4_e2m1", 1)

    for got, want in zip(ours, gradients(linear, x, model), strict=True):
        assert same(got, want)

    ours = gradients(qat := prepared(model, x, activation="mxfp8", gradient="mxfp4"), x, qat)

    def activation_only(x):
        x = fake_quantize_mx(x, "mxfp8")
        return NoopFwToMXBw.apply(functional.linear(x, model.weight), "fp4_e2m1", 32)

    theirs = gradients(activation_only, x, model)
    assert same(ours[1], theirs[1]) and not torch.equal(ours[2], theirs[2])


def test_stochastic_rounding_is_unbiased_and_seeded():
    model, x = nn.Linear(24, 40), numbers(34, 24)
    formats = {"activation": "mxfp8", "weight": "mxfp8"}
    qat = prepared(model, x, gradient="mxfp4(ceil,stochastic)", **formats)
    want = gradients(fine := prepared(model, x, gradient=FINE, **formats), x, fine)
    draws = []
    for seed in (*range(300), 0):
        torch.manual_seed(seed)
        draws.append(gradients(qat, x, qat))
    for i in (1, 2):  # of x, of the weight
        one, mean = draws[0][i], torch.stack([d[i] for d in draws[:-1]]).mean(0)
        assert torch.equal(one, draws[-1][i]) and not torch.equal(one, draws[1][i])
        assert relative_error(mean, want[i]) < 0.15 * relative_error(one, want[i])
    assert torch.equal(draws[0][3], want[3])  # the bias has the sums of the gradient itself


def test_both_factors_are_rotated():
    model, x = nn.Linear(64, 40, bias=False), numbers(33, 64)
    qat = prepared(model, x, activation="mxfp8", weight="mxfp6", gradient="mxfp4", gradient_hadamard=32)
    _, of_x, of_weight = gradients(qat, x, qat)

    def factor(t, spelling, axis):
        rows = [0, 0, 0, -t.shape[0] % 32] if axis == 0 else [0, -t.shape[1] % 32]
        return fake_quantize_mx(torch.ops.pt2mx.hadamard(functional.pad(t, rows), 32, axis), spelling, axis=axis)

    grad, weight = torch.randn(33, 40, generator=torch.Generator().manual_seed(3)), model.weight.detach()
    assert same(of_x, factor(grad, "mxfp4", 1) @ factor(weight, "mxfp6", 0))
    assert same(of_weight, factor(grad, "mxfp4", 0).t() @ factor(x, "mxfp8", 0))
