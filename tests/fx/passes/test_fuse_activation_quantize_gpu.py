"""Which quantizations are calls on a GPU: the rules, run on the CPU, and compiled code on a GPU."""

import pytest
import torch
from torch import nn

from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor, ops
from pt2mx.fx.passes import fuse_activation_quantize as module
from pt2mx.kernels.select import USES
from pt2mx.ops.activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx
from tests.compare import relative_error
from tests.flow import convert
from tests.graph import calls, count
from tests.models import FeedForward, SelfAttention


@pytest.fixture(autouse=True)
def rules_of_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "_MIN_VALUES", 0)
    monkeypatch.setitem(USES, "quantize the result of a matmul", {})
    monkeypatch.setitem(USES, "quantize activations", dict.fromkeys(("cpu", "cuda"), "gpu.uses:quantizes_rows"))
    monkeypatch.setitem(USES, "quantize activations alone", {})
    monkeypatch.setattr("pt2mx.fx.passes.bf16_matmul._is_faster_in_bf16", lambda *args: False)


def lowered(model, x, name="mxfp8", block_size=32):
    config = get_default_mx_quantization_config(name, name, block_size)
    converted = convert(model.eval().to(x.dtype), (x,), MXQuantizer().set_global(config))
    return converted, lower_to_inductor(converted)


def test_a_norm_and_an_activation():
    """x is quantized by Inductor, which may have computed it."""
    x = torch.randn(40, 64).bfloat16()
    converted, fused = lowered(FeedForward(), x)
    assert [n.args[1] for n in calls(fused, activation_fake_quantize_mx)] == ["gelu"]
    assert count(fused, layer_norm_fake_quantize_mx) == 1 and count(fused, ops.fake_quantize_mx) == 1
    assert relative_error(fused(x), converted(x)) < 3e-2


def test_what_inductor_computes_stays():
    _, fused = lowered(FeedForward(activation=nn.Tanh()), torch.randn(40, 64).bfloat16())
    assert count(fused, ops.fake_quantize_mx) == 2 and not count(fused, activation_fake_quantize_mx)


def test_the_result_of_a_product():
    x = torch.randn(2, 20, 64).bfloat16()
    converted, fused = lowered(SelfAttention(), x)
    assert [n.args[1] for n in calls(fused, activation_fake_quantize_mx)] == ["none"]
    assert relative_error(fused(x), converted(x)) < 3e-2


@pytest.mark.parametrize(
    ("dtype", "width", "name", "block_size"),
    [
        (torch.float32, 64, "mxfp8", 32),
        (torch.bfloat16, 72, "mxfp8", 32),
        (torch.bfloat16, 64, "mxfp8", 16),
        (torch.bfloat16, 64, "mxfp8(mse)", 32),
        (torch.bfloat16, 64, "mxfp8(half_away)", 32),
    ],
)
def test_what_the_kernels_do_not_take_stays(dtype, width, name, block_size):
    _, same = lowered(FeedForward(width), torch.randn(40, width, dtype=dtype), name, block_size)
    assert not count(same, activation_fake_quantize_mx) and not count(same, layer_norm_fake_quantize_mx)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["mxfp8", "mxint8"])
def test_compiled_on_a_gpu(name, mode):
    """By calls in CUDA graphs, and by Inductor without."""
    x = torch.randn(80, 64).bfloat16()
    converted, _ = lowered(FeedForward(), x, name)
    fused = lower_to_inductor(converted, device="cuda", unpack=True)
    assert count(fused, layer_norm_fake_quantize_mx) == 1
    x = x.cuda()
    with torch.no_grad():
        want, compiled = fused(x), torch.compile(fused, mode=mode)
        for _ in range(3):
            assert relative_error(compiled(x), want) < 2e-2
