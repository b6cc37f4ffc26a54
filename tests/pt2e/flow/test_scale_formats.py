"""NVFP4 and other formats with scales other than E8M0, from the config to the saved and the compiled program."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2mx
from pt2mx import MXFakeQuantize, MXQuantizationConfig, MXQuantizer
from pt2mx.compat import PRESETS
from tests.flow import calibrated, exported
from tests.pt2mx.test_nvfp4 import INPUTS, TWO_LEVELS, bits, recorded

#: weight, activation
FORMATS = (
    ("nvfp4", "nvfp4"),
    ("nvfp4(four_six)", "nvfp4(nearest_reciprocal)"),
    ("fp8_e4m3{32x32}(f32)", "fp8_e4m3{32}(f32)"),
    ("int4{32}(bf16)", None),
    ("fp8_e4m3{row}(f32)", "fp8_e4m3{row}(f32)"),
    ("mxfp8{32x32}", "mxfp8"),
)
BATCH = ({0: torch.export.Dim.DYNAMIC},)


class Net(nn.Module):
    """Two layers of an encoder."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(72, 48), nn.LayerNorm(48), nn.Linear(48, 24)

    def forward(self, x):
        return self.down(F.gelu(self.norm(self.up(x))))


X = torch.randn(5, 72, generator=torch.Generator().manual_seed(0))


def fake_quantized(net, x, weight, activation, **options):
    """Return the result of the definition."""

    def quantized(x, spec):
        return x if spec is None else pt2mx.fake_quantize_mx(x, spec, **options)

    def linear(layer, x):
        return F.linear(quantized(x, activation), quantized(layer.weight, weight), layer.bias)

    return linear(net.down, F.gelu(net.norm(linear(net.up, x))))


def prepared(net, weight, activation, prepare=pt2mx.prepare_pt2e, **config):
    config = {"tensor_scale": "dynamic", **config}
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight=weight, activation=activation, **config))
    return calibrated(exported(net, X, dynamic_shapes=BATCH), quantizer, X, prepare=prepare)


@pytest.mark.compiled_except("nvfp4-nvfp4", "fp8_e4m3{32x32}*", "int4{32}*")
@pytest.mark.parametrize(("weight", "activation"), FORMATS)
def test_converted_models_compute_the_definition(weight, activation, tmp_path):
    net = Net().eval()
    model = prepared(net, weight, activation)
    pt2mx.enable_fake_quant(model)
    with torch.no_grad():
        want = fake_quantized(net, X, weight, activation)
        converted = pt2mx.convert_pt2e(model)
        assert torch.equal(model(X), want) and torch.equal(converted(X), want)
        assert torch.equal(converted(X[:3]), fake_quantized(net, X[:3], weight, activation))
        lowered = pt2mx.lower_to_inductor(converted)
        torch.testing.assert_close(lowered(X), want, rtol=1e-5, atol=1e-6)
        pt2mx.save_program(torch.export.export(converted, (X,), dynamic_shapes=BATCH), tmp_path / "net.pt2")
        assert torch.equal(pt2mx.load_program(tmp_path / "net.pt2").module()(X), want)
    spec = pt2mx.parse(weight)
    scale, data = pt2mx.quantize_mx(net.up.weight, spec, tensor_scale=_tensor_scale(net.up.weight, spec))
    assert torch.equal(converted.up.weight_data, data) and torch.equal(converted.up.weight_scale, scale)
    assert not [name for name, _ in converted.named_parameters() if name.endswith("weight") and "norm" not in name]


def _tensor_scale(x, spec):
    return pt2mx.tensor_scale_mx(x, spec) if spec.scale_format.tensor else None


@pytest.mark.compiled
@pytest.mark.parametrize(("weight", "activation"), FORMATS[:3])
def test_compiled_models(weight, activation, compiler):
    net = Net().eval()
    with torch.no_grad():
        want = fake_quantized(net, X, weight, activation)
        lowered = pt2mx.lower_to_inductor(pt2mx.convert_pt2e(prepared(net, weight, activation)))
        torch.testing.assert_close(torch.compile(lowered, fullgraph=True)(X), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ste", ["identity", "clipped"])
def test_gradients_of_training(ste):
    net = Net()
    model = prepared(net, "nvfp4", "nvfp4", pt2mx.prepare_qat_pt2e, ste=ste)
    assert len([m for m in model.modules() if isinstance(m, MXFakeQuantize)]) == 4
    model(X).square().sum().backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    fake_quantized(net, X, "nvfp4", "nvfp4", ste=ste).square().sum().backward()
    for name, p in net.named_parameters():
        assert torch.equal(got[name], p.grad), name


@pytest.mark.parametrize("ste", ["identity", "clipped"])
def test_a_step_of_training_and_conversion(ste):
    net = Net()
    model = prepared(net, "nvfp4", "nvfp4", pt2mx.prepare_qat_pt2e, ste=ste)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(X).square().mean().backward()
    optimizer.step()
    net.load_state_dict(dict(model.named_parameters()))
    with torch.no_grad():
        assert torch.equal(pt2mx.convert_pt2e(model)(X), fake_quantized(net, X, "nvfp4", "nvfp4"))


class Layers(nn.Module):
    """A layer for each recorded tensor, which is its weight and its input."""

    def __init__(self, tensors):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(x.shape[1], x.shape[0], bias=False) for x in tensors)
        for layer, x in zip(self.layers, tensors, strict=True):
            layer.weight.data.copy_(x)

    def forward(self, *inputs):
        return tuple(layer(x) for layer, x in zip(self.layers, inputs, strict=True))


@pytest.mark.parametrize("library", TWO_LEVELS)
def test_the_numbers_of_three_libraries(library):
    """Codes and scales of weights, and quantized inputs, of a config with a library's preset, equal its own."""
    preset, (folder, tensor) = PRESETS[library], TWO_LEVELS[library]
    inputs = [recorded(name, "float32", "x") for name in INPUTS]
    spec = preset.spec("nvfp4")
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight=spec, activation=spec))
    converted = pt2mx.convert_pt2e(calibrated(exported(Layers(inputs).eval(), *inputs), quantizer, *inputs))
    with torch.no_grad():
        results = converted(*inputs)
    for i, name in enumerate(INPUTS):
        part = f"layers.{i}.weight"
        scales = [converted.get_buffer(f"{part}_tensor_scale"), converted.get_buffer(f"inputs_{i}_tensor_scale")]
        assert all(bits(t) == bits(recorded(name, "float32", f"{folder}/{tensor}")) for t in scales)
        scale, codes = converted.get_buffer(f"{part}_scale"), converted.get_buffer(f"{part}_data")
        assert bits(scale) == bits(recorded(name, "float32", f"{folder}/scale"))
        if (want := recorded(name, "float32", f"{folder}/codes")) is not None:
            assert torch.equal(codes, want)
        values = recorded(name, "float32", f"{folder}/dequantized")
        values = preset.fake_quantize(inputs[i], "nvfp4") if values is None else values
        assert torch.equal(results[i], F.linear(values, values))


def test_a_bias_without_rows_for_its_blocks():
    converted = pt2mx.convert_pt2e(prepared(Net().eval(), "mxfp8", None, bias="fp8_e4m3{32x32}(f32)"))
    first = pt2mx.quantization_report(converted).operators[0]
    assert first.reason == "up_bias has no second dimension for blocks of 32 rows (fp8_e4m3{32x32}(f32))"
    assert [operand.spec is None for operand in first.operands] == [True, False, True]
