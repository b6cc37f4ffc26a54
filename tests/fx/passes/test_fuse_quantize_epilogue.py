"""Matmuls whose kernel quantizes the result: which ones are fused, and that the bits stay the same."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config, lower_to_inductor
from pt2mx.fx.passes import fuse_activation_quantize
from pt2mx.fx.passes.fuse_quantize_epilogue import fuse_quantize_epilogue
from pt2mx.kernels.cpu import uses
from pt2mx.kernels.cpu.linear import AMX, INT8
from pt2mx.ops.activations import activation_fake_quantize_mx
from pt2mx.ops.linear import linear_mx
from pt2mx.ops.quantize_epilogue import linear_fake_quantize_mx
from tests.compare import gradient_of
from tests.flow import convert, lowered_without
from tests.graph import count, namespaces
from tests.models import module_of


@pytest.fixture(autouse=True)
def small_tensors_on_every_machine(monkeypatch):
    monkeypatch.setattr(fuse_activation_quantize, "_MIN_VALUES", 0)
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: AMX)
    monkeypatch.setattr(uses, "integers_are_faster", lambda *sizes: True)


class Layer(nn.Module):
    def __init__(self, activation=None, between=None):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.activation, self.between = activation or nn.GELU(), between or nn.Identity()

    def forward(self, x):
        return self.down(self.activation(self.between(self.up(x))))


def lowered(model, x, recipe="mxint8", **options):
    """Return the lowered model with and without the pass."""
    converted = convert(model.eval().to(x.dtype), (x,), recipe, **options)
    return lower_to_inductor(converted), lowered_without(fuse_quantize_epilogue, converted)


ACTIVATIONS = {
    "gelu": nn.GELU(),
    "tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "none": nn.Identity(),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxint8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_between_two_matmuls(name, recipe, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 40, 64, dtype=dtype)
    fused, without = lowered(Layer(ACTIVATIONS[name]), x, recipe)
    assert count(fused, linear_fake_quantize_mx) == 1 and count(fused, linear_mx) == 1
    assert torch.equal(fused(x), without(x))


@pytest.mark.compiled_except("gelu-mxfp8")
@pytest.mark.parametrize("recipe", ["mxint8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_between_two_compiled_matmuls(name, recipe):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 40, 64, dtype=dtype)
        fused, _ = lowered(Layer(ACTIVATIONS[name]), x, recipe)
        torch.testing.assert_close(torch.compile(fused)(x), fused(x), rtol=0, atol=0)


def test_queries_keys_and_values():
    """Queries, keys and values are one matmul, quantized by one epilogue."""

    def forward(self, x):  # (B, S, 64)
        q, k, v = (layer(x).unflatten(-1, (2, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    torch.manual_seed(0)
    x = torch.randn(2, 40, 64, dtype=torch.bfloat16)
    attention = module_of(forward, **{name: nn.Linear(64, 64) for name in "qkv"})
    fused, without = lowered(attention, x, "mxfp8")
    assert (count(fused, linear_fake_quantize_mx), count(fused, linear_mx)) == (1, 0)
    assert torch.equal(fused(x), without(x))


class Twice(Layer):
    def forward(self, x):
        y = self.up(x)
        return self.down(self.activation(y)), y


class Written(Layer):
    def forward(self, x):
        y = self.up(x)
        y[:, :3] = 1.0
        return self.down(self.activation(y))


@pytest.mark.parametrize("model", [Twice(), Written(), Layer(between=nn.Tanh())])
def test_matmuls_with_another_user_stay(model):
    torch.manual_seed(0)
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    fused, without = lowered(model, x, "mxfp8")
    assert not count(fused, linear_fake_quantize_mx)
    torch.testing.assert_close(fused(x), without(x), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [8, 32])
def test_few_rows_stay(rows):
    fused, _ = lowered(Layer(), torch.randn(rows, 64, dtype=torch.bfloat16))
    assert not count(fused, linear_fake_quantize_mx)


@pytest.mark.parametrize("has_integers", [True, False])
def test_a_processor_that_multiplies_integers_alone(has_integers, monkeypatch):
    """A bfloat16 x that is quantized otherwise may be no integers, so the kernel might compute nothing."""
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: INT8)
    monkeypatch.setattr(uses, "are_integers", lambda k, *specs: has_integers)
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    fused, without = lowered(Layer(), x)
    assert count(fused, linear_fake_quantize_mx) == has_integers
    assert torch.equal(fused(x), without(x))


def test_blocks_of_another_size_stay():
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp8", "mxfp8", block_size=16))
    fused = lower_to_inductor(convert(Layer().bfloat16().eval(), (x,), quantizer))
    assert count(fused, activation_fake_quantize_mx) and not count(fused, linear_fake_quantize_mx)


def test_dynamic_rows():
    torch.manual_seed(0)
    x, rows = torch.randn(40, 64, dtype=torch.bfloat16), torch.export.Dim("rows", min=2)
    fused, without = lowered(Layer(), x, "mxfp8", shapes=({0: rows},))
    assert count(fused, linear_fake_quantize_mx) == 1
    for n in (2, 33, 100):
        other = torch.randn(n, 64, dtype=torch.bfloat16)
        assert torch.equal(fused(other), without(other))


def test_what_else_knows_lowered_matmuls():
    torch.manual_seed(0)
    x = torch.randn(2048, 64, dtype=torch.bfloat16)
    fused, _ = lowered(Layer(), x, "mxfp8")
    assert [weight.name for weight in pt2mx.packed_weights(fused)] == ["up.weight", "down.weight"]
    with pytest.raises(MXError, match="reads a packed weight"):
        pt2mx.quantization_report(fused)
    program = pt2mx.make_portable(torch.export.export(fused, (x,)))
    assert "pt2mx" not in namespaces(program.graph_module)
    torch.testing.assert_close(program.module()(x), fused(x), rtol=0.05, atol=0.05)


def test_gradients_and_autocast():
    torch.manual_seed(0)
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    fused, without = lowered(Layer(), x, "mxfp8")
    torch.testing.assert_close(gradient_of(fused, x), gradient_of(without, x), rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.float16):
        assert fused(x).dtype == without(x).dtype == torch.float16
