"""A convolution kernel quantizes the activation: for these graphs, with the same bits."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config, lower_to_inductor
from pt2mx.extras import import_extra
from pt2mx.fx.passes.fuse_quantize_epilogue import fuse_quantize_epilogue
from pt2mx.kernels.cpu import uses
from pt2mx.kernels.cpu.linear import AVX512_BF16
from pt2mx.ops.convolution import conv2d_mx
from pt2mx.ops.quantize_epilogue import conv2d_fake_quantize_mx
from tests.compare import gradient_of
from tests.flow import convert, exported, lowered_without
from tests.graph import count, namespaces


@pytest.fixture(autouse=True)
def bfloat16_instructions_on_every_machine(monkeypatch):
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: 0 if spec.block_size % 32 else AVX512_BF16)


def lowered(model, x, recipe="mxint8", **options):
    """Return the lowered model with and without the pass."""
    converted = convert(model.eval().to(x.dtype), (x,), recipe, **options)
    return lower_to_inductor(converted), lowered_without(fuse_quantize_epilogue, converted)


def assert_same(fused, without, x, exact=True):
    got, want = fused(x), without(x)
    got, want = ((y,) if isinstance(y, torch.Tensor) else y for y in (got, want))
    for actual, expected in zip(got, want, strict=True):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(
            actual, expected, **({"rtol": 0, "atol": 0} if exact else {"rtol": 0.03, "atol": 0.03})
        )


class Between(nn.Module):
    """Two convolutions with `between` in the middle. Returns the last one's result, and the results of `between` except
    the first."""

    def __init__(self, between, channels=64):
        super().__init__()
        self.first, self.second = nn.Conv2d(32, channels, 3, padding=1), nn.Conv2d(channels, 32, 1)
        self.shortcut, self.between = nn.Conv2d(32, channels, 1), between

    def forward(self, x):
        y, *others = self.between(self, x)
        return self.second(y), *others


def activated(module, x):
    return (torch.relu(module.first(x)),)


def in_place(module, x):
    return (torch.relu_(module.first(x)),)


def silu(module, x):
    return (nn.functional.silu(module.first(x), inplace=True),)


def gelu(module, x):
    return (nn.functional.gelu(module.first(x), approximate="tanh"),)


def nothing(module, x):
    return (module.first(x),)


def residual(module, x):
    return (torch.relu(module.first(x) + x.repeat(1, 2, 1, 1)),)


def other_side(module, x):
    return (torch.relu(x.repeat(1, 2, 1, 1) + module.first(x)),)


def residual_in_place(module, x):
    y = module.first(x)
    y += module.shortcut(x)
    return (y.relu_(),)


def residual_alone(module, x):
    return (module.first(x) + module.shortcut(x),)


def read_again(module, x):
    y = torch.relu(module.first(x))
    return y, y + 1, y.mean((2, 3))


def written_behind(module, x):
    """The activation, after it was quantized."""
    y = torch.relu_(module.first(x) + module.shortcut(x))
    z = module.second(y)
    y.mul_(2)
    return torch.cat([z, z], 1), y


FUSED = [
    activated, in_place, silu, gelu, nothing, residual, other_side, residual_in_place, residual_alone, read_again,
    written_behind,
]  # fmt: skip


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("between", FUSED)
def test_chains(between, dtype):
    torch.manual_seed(0)
    for recipe in ("mxint8", "mxfp8"):
        x = torch.randn(2, 32, 6, 7, dtype=dtype)
        fused, without = lowered(Between(between), x, recipe)
        assert count(fused, conv2d_fake_quantize_mx) == 1
        assert_same(fused, without, x, between not in (silu, gelu))


def broadcast(module, x):
    return (torch.relu(module.first(x) + module.shortcut(x).mean((2, 3), keepdim=True)),)


def scaled(module, x):
    return (torch.relu(torch.add(module.first(x), module.shortcut(x), alpha=2)),)


def doubly_read(module, x):
    y = module.first(x)
    return torch.relu(y), y


def doubled(module, x):
    y = module.first(x)
    return (torch.relu(y + y),)


def written(module, x):
    y = module.first(x)
    y[:, :3] = 1.0
    return (torch.relu(y),)


def written_before_it_is_quantized(module, x):
    y = torch.relu(module.first(x))
    y.mul_(2)
    return (y,)


def added_before_a_write(module, x):
    shortcut = module.shortcut(x)
    y = module.first(x) + shortcut
    shortcut.mul_(3)
    return torch.relu(y), shortcut


def into_another(module, x):
    y = module.shortcut(x) * 2
    y += module.first(x)
    return (torch.relu(y),)


def tanh(module, x):
    return (torch.tanh(module.first(x)),)


@pytest.mark.parametrize(
    "model",
    [
        *map(Between, (broadcast, scaled, doubly_read, doubled, written, written_before_it_is_quantized)),
        *map(Between, (added_before_a_write, into_another, tanh)),
        Between(activated, 40),  # columns that are no whole blocks
    ],
    ids=lambda model: f"{model.between.__name__}-{model.first.out_channels}",
)
def test_others_stay(model):
    x = torch.randn(2, 32, 6, 7)
    fused, without = lowered(model, x, "mxint8" if model.first.out_channels == 64 else "mxfp8")
    assert not count(fused, conv2d_fake_quantize_mx)
    assert_same(fused, without, x)


def test_blocks_of_another_size_stay():
    x = torch.randn(2, 32, 6, 7)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp8", "mxfp8{64}"))
    fused, without = lowered(Between(activated), x, quantizer)
    assert_same(fused, without, x)


def test_weights_with_other_scales_stay():
    """The fused operator has E8M0 scales alone."""
    scales, codes = pt2mx.quantize_mx(torch.randn(32, 1, 1, 64), "int8{32}(e4m3)")

    class Convolution(nn.Module):
        def forward(self, x):
            kernel = codes, scales, None, "int8", 32, [1, 1], [0, 0], [1, 1], None, "e4m3"
            y = torch.ops.pt2mx.conv2d_mx(x, *kernel)
            return torch.ops.pt2mx.activation_fake_quantize_mx(y, "relu", "int8", 32, "floor", "even")

    x = torch.randn(2, 8, 8, 64)
    model = exported(Convolution(), x)
    want = model(x)
    fuse_quantize_epilogue(model)
    assert count(model, conv2d_mx) == 1 and torch.equal(model(x), want)


def test_one_dimension():
    model = nn.Sequential(nn.Conv1d(32, 64, 5), nn.ReLU(), nn.Conv1d(64, 32, 3, padding=1))
    x = torch.randn(3, 32, 40)
    fused, without = lowered(model, x)
    assert count(fused, conv2d_fake_quantize_mx) == 1
    assert_same(fused, without, x)


@pytest.mark.usefixtures("compiler")
@pytest.mark.compiled  # test_real_models of test_lowered_models.py has ResNet-18, too
def test_resnet():
    """Both quantizations of every block, except activations with other users."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    fused, without = lowered(import_extra("torchvision", "vision").models.resnet18(), x, "mxfp8")
    assert count(fused, conv2d_fake_quantize_mx) == 15 and count(fused, conv2d_mx) == 5
    with torch.no_grad():
        assert_same(fused, without, x)
        compiled = torch.compile(fused)(x)
    torch.testing.assert_close(compiled, fused(x), rtol=0.05, atol=0.05)


def test_dynamic_sizes():
    torch.manual_seed(0)
    x, shapes = torch.randn(2, 32, 6, 7), ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},)
    fused, without = lowered(Between(residual_in_place), x, shapes=shapes)
    assert count(fused, conv2d_fake_quantize_mx) == 1
    for shape in ((2, 32, 6, 7), (1, 32, 4, 7), (5, 32, 9, 7)):
        assert_same(fused, without, torch.randn(shape))


@pytest.mark.compiled
def test_what_else_knows_lowered_matmuls(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 32, 6, 7)
    fused, without = lowered(Between(residual_in_place), x, "mxfp8")
    names = [weight.name for weight in pt2mx.packed_weights(fused)]
    assert names == ["shortcut.weight_rows", "first.weight_rows", "second.weight_rows"]
    with pytest.raises(MXError, match="reads a packed weight"):
        pt2mx.quantization_report(fused)
    program = torch.export.export(fused, (x,))
    torch.export.save(program, tmp_path / "program.pt2")
    assert_same(torch.export.load(tmp_path / "program.pt2").module(), without, x)
    portable = pt2mx.make_portable(program)
    assert "pt2mx" not in namespaces(portable.graph_module)
    torch.testing.assert_close(portable.module()(x), fused(x), rtol=0.05, atol=0.05)


def test_gradients_and_autocast():
    torch.manual_seed(0)
    x = torch.randn(2, 32, 6, 7)
    fused, without = lowered(Between(residual), x, "mxfp8")
    of_fused, of_both = (gradient_of(lambda x, model=model: model(x)[0], x) for model in (fused, without))
    torch.testing.assert_close(of_fused, of_both, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(x)[0].dtype == without(x)[0].dtype == torch.bfloat16
