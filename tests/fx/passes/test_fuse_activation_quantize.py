"""Fuse the quantization of an activation into its kernel: which graphs are fused, which stay, with the same numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor, ops
from pt2mx.fx.passes import fuse_activation_quantize as module
from pt2mx.kernels import select
from pt2mx.kernels.select import USES
from pt2mx.ops.activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx
from pt2mx.ops.linear import linear_mx
from tests.compare import gradient_of, relative_error
from tests.flow import convert
from tests.graph import calls, count
from tests.models import BATCH, FeedForward, SelfAttention, module_of

FUSED = (activation_fake_quantize_mx, layer_norm_fake_quantize_mx)


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(module, "_MIN_VALUES", 0)
    monkeypatch.setitem(USES, "quantize the result of a matmul", {})


def lowered(model, x, recipe="mxfp8", **options):
    converted = convert(model.eval().to(x.dtype), (x,), recipe, **options)
    return converted, lower_to_inductor(converted)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxint8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("width", [64, 72])
def test_a_layer_with_its_norm_and_activation(recipe, dtype, width):
    x = torch.randn(3, 40, width, dtype=dtype)
    converted, fused = lowered(FeedForward(width), x, recipe)
    assert count(fused, layer_norm_fake_quantize_mx) == 1 and not count(fused, ops.fake_quantize_mx)
    assert "gelu" in [n.args[1] for n in calls(fused, activation_fake_quantize_mx)]
    assert not count(fused, torch.ops.aten.gelu.default) and not count(fused, torch.ops.aten.layer_norm.default)
    (norm,) = calls(fused, layer_norm_fake_quantize_mx)
    assert norm.args[1] is not None  # the residual
    assert [value.shape for value in norm.meta["val"]] == [x.shape] * 2
    assert relative_error(fused(x), converted(x)) < (2e-3 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    ("activation", "names"),
    [(nn.GELU("tanh"), ["gelu_tanh"]), (nn.SiLU(), ["silu"]), (nn.ReLU(), ["relu"]), (nn.Tanh(), [])],
)
def test_activations(activation, names):
    x = torch.randn(40, 64)
    converted, fused = lowered(FeedForward(activation=activation), x)
    assert [n.args[1] for n in calls(fused, activation_fake_quantize_mx) if n.args[1] != "none"] == names
    assert relative_error(fused(x), converted(x)) < 2e-3


def test_queries_keys_and_values_are_quantized_by_one_call():
    x = torch.randn(2, 20, 64)
    converted, fused = lowered(SelfAttention(), x)
    assert count(fused, linear_mx) == 1 and calls(fused, linear_mx)[0].args[3] is not None  # the bias
    assert [n.args[1] for n in calls(fused, activation_fake_quantize_mx)][-1] == "none"
    assert not count(fused, ops.fake_quantize_mx)
    assert relative_error(fused(x), converted(x)) < 1e-3


def test_a_sum_that_something_else_reads_stays():
    def forward(self, x):
        summed = x + x.flip(0)
        return self.first(self.norm(summed)) + summed

    x = torch.randn(40, 64)
    converted, fused = lowered(module_of(forward, norm=nn.LayerNorm(64), first=nn.Linear(64, 64)), x)
    assert calls(fused, layer_norm_fake_quantize_mx)[0].args[1] is None
    assert relative_error(fused(x), converted(x)) < 1e-3


def test_what_is_written_is_read_where_it_was():
    def forward(self, x):
        y = self.first(x)
        summed = x + y
        active = F.gelu(y)
        y.mul_(3)
        normed = self.norm(summed)
        late = self.second(normed)
        z = self.norm(y)
        z.add_(1)
        return late + self.second(active) + self.second(z) + y

    x = torch.randn(40, 64)
    model = module_of(forward, first=nn.Linear(64, 64), norm=nn.LayerNorm(64), second=nn.Linear(64, 64))
    converted, fused = lowered(model, x)
    assert [n.args[1] for n in calls(fused, layer_norm_fake_quantize_mx)] == [None]  # of an unwritten tensor
    assert "gelu" not in [n.args[1] for n in calls(fused, activation_fake_quantize_mx)]
    assert relative_error(fused(x), converted(x)) < 1e-3


@pytest.mark.parametrize("activations", ["mxfp8(stochastic)", "int12", None])
def test_what_stays(activations):
    quantizer: object = "mxfp4_weight_only"
    if activations:
        quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp8", activations))
    _, same = lowered(FeedForward(), torch.randn(40, 64), quantizer)
    assert not sum(count(same, target) for target in FUSED)


def test_small_tensors_stay(monkeypatch):
    monkeypatch.undo()
    _, same = lowered(FeedForward(), torch.randn(40, 64))
    assert not sum(count(same, target) for target in FUSED)


def test_a_machine_without_a_compiler(monkeypatch):
    monkeypatch.setitem(select._RUNS, "cpu", lambda device: False)
    _, same = lowered(FeedForward(), torch.randn(40, 64))
    assert not sum(count(same, target) for target in FUSED)


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["mxint8", "mxfp8"])
def test_dynamic_rows_export_and_compilation(recipe):
    x = torch.randn(80, 64)
    converted, fused = lowered(FeedForward(), x, recipe, shapes=BATCH)
    program = torch.export.export(fused, (x,), dynamic_shapes=BATCH).module()
    compiled = torch.compile(fused, dynamic=True)
    for n in (80, 37):
        want = fused(x[:n])
        assert torch.equal(program(x[:n]), want) and relative_error(want, converted(x[:n])) < 2e-3
        torch.testing.assert_close(compiled(x[:n]), want)


def test_a_gradient_passes():
    x = torch.randn(40, 64)
    converted, fused = lowered(FeedForward(), x)
    assert relative_error(gradient_of(fused, x), gradient_of(converted, x)) < 1e-2


def test_autocast_around_it():
    x = torch.randn(40, 64)
    converted, fused = lowered(FeedForward(), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(fused(x), converted(x)) < 5e-2


def test_dimensions_keep_their_order_in_memory():
    """`view` and strides behind a quantization of a permuted tensor."""

    class Net(nn.Module):
        def forward(self, x):
            quantized = ops.fake_quantize_mx(
                x.transpose(0, 1) * 1.0, "fp8_e4m3", 32, -1, "floor", "even", None, "identity"
            )
            return quantized.transpose(0, 1).view(-1), quantized

    x = torch.randn(8, 4, 64)
    exported = torch.export.export(Net(), (x,)).module()
    for got, want in zip(lower_to_inductor(exported)(x), exported(x), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()
