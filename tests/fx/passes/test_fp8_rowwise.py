"""Matmuls on FP8 tensor cores: which ones use FP8 rows, and that they give the same numbers."""

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor, ops
from pt2mx.fx import lower
from pt2mx.fx.passes import fp8_rowwise, fuse_activation_quantize
from pt2mx.fx.passes.fp8_rowwise import use_fp8_rowwise
from pt2mx.kernels.select import USES
from pt2mx.ops import inductor
from pt2mx.ops.activations import activation_fake_quantize_mx
from pt2mx.ops.fp8_rowwise import layer_norm_fp8_rows, mm_fp8_rows, quantize_fp8_rows
from pt2mx.ops.linear import linear_mx
from tests.compare import relative_error
from tests.every_device import everywhere
from tests.flow import convert
from tests.graph import calls, count
from tests.models import BATCH, FeedForward, SelfAttention, module_of

ROWS = (quantize_fp8_rows, layer_norm_fp8_rows, mm_fp8_rows)


@pytest.fixture(autouse=True)
def of_every_size(monkeypatch):
    monkeypatch.setattr(fp8_rowwise, "_LEAST_ROWS", 0)
    monkeypatch.setattr(fp8_rowwise, "_LEAST_WEIGHT", 0)


@pytest.fixture(autouse=True)
def without_bfloat16_instructions(monkeypatch):
    monkeypatch.setattr("pt2mx.fx.passes.bf16_matmul._is_faster_in_bf16", lambda *args: False)


def with_rows(model, x, recipe="mxfp4", **options):
    """Return the converted model, the lowered model, and the lowered model with FP8 rows."""
    converted = convert(model.eval().to(x.dtype), (x,), recipe, **options)
    lowered, rows = lower_to_inductor(converted), lower_to_inductor(converted)
    everywhere(use_fp8_rowwise)(rows)
    return converted, lowered, rows


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp6", "mxfp6_e3m2"])
def test_a_layer_with_its_norm_and_activation(recipe):
    x, quantizer = torch.randn(3, 40, 64).bfloat16(), config(recipe)
    converted, _, rows = with_rows(FeedForward(), x, quantizer)
    assert [count(rows, target) for target in ROWS] == [2, 1, 3] and not count(rows, linear_mx)
    assert calls(rows, quantize_fp8_rows)[1].args[-1] == "gelu"
    assert calls(rows, layer_norm_fp8_rows)[0].args[1] is not None  # the residual
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in calls(rows, mm_fp8_rows))
    assert relative_error(rows(x), converted(x)) < 4e-3


def config(name, activation=None, block_size=32):
    return MXQuantizer().set_global(get_default_mx_quantization_config(name, activation or name, block_size))


@pytest.mark.compiled_except("activation0-*", "activation4-*")
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (nn.ReLU(), "relu"),
        (nn.Tanh(), "none"),
        (nn.ELU(), "none"),
    ],
)
def test_activations(activation, name):
    x = torch.randn(40, 64).bfloat16()
    converted, _, rows = with_rows(FeedForward(activation=activation), x)
    assert calls(rows, quantize_fp8_rows)[1].args[-1] == name
    assert relative_error(rows(x), converted(x)) < 4e-3


def test_two_elements():
    x = torch.randn(40, 64).bfloat16()
    converted, _, rows = with_rows(FeedForward(), x, config("mxfp4", "mxfp6"))
    assert count(rows, mm_fp8_rows) == 3 and {n.args[1] for n in calls(rows, quantize_fp8_rows)} == {"fp6_e2m3"}
    assert relative_error(rows(x), converted(x)) < 4e-3


@pytest.mark.parametrize(
    ("quantizer", "dtype"),
    [
        (config("mxfp8"), torch.bfloat16),
        (config("mxint8"), torch.bfloat16),
        (config("mxfp4", "mxfp8"), torch.bfloat16),
        (config("mxfp4", block_size=16), torch.bfloat16),
        (config("mxfp4(stochastic)"), torch.bfloat16),
        (config("mxfp4"), torch.float32),
        ("mxfp4_weight_only", torch.bfloat16),
    ],
)
def test_what_stays(quantizer, dtype):
    _, _, rows = with_rows(FeedForward(), torch.randn(40, 64, dtype=dtype), quantizer)
    assert not sum(count(rows, target) for target in ROWS)


def test_sizes_that_tensor_cores_do_not_take_stay():
    for width in (24, 48):  # no whole blocks
        _, _, rows = with_rows(FeedForward(width), torch.randn(40, width).bfloat16())
        assert count(rows, mm_fp8_rows) == (1 if width == 48 else 0)  # of 96 columns


def test_a_weight_with_a_row_that_does_not_fit_stays():
    model = FeedForward()
    with torch.no_grad():
        model.up.weight[3, :32] *= 2.0**-40
    x = torch.randn(40, 64).bfloat16()
    converted, _, rows = with_rows(model, x)
    assert count(rows, mm_fp8_rows) == 2 and count(rows, linear_mx) == 1
    assert relative_error(rows(x), converted(x)) < 4e-3


def test_rows_of_x_that_do_not_fit_are_multiplied_exactly():
    model = FeedForward()
    with torch.no_grad():
        model.first.weight[:, 32:] = 0  # of the large values in x
    x = torch.randn(40, 64).bfloat16()
    x[3, :32] *= 2.0**-30
    converted, _, rows = with_rows(model, x)
    assert relative_error(rows(x), converted(x)) < 4e-3
    assert relative_error(rows(x)[3], converted(x)[3]) < 4e-3


def test_a_norm_with_several_readers_and_one_of_another_shape():
    def forward(self, x):
        normed = self.norm(x)
        return self.first(normed) + normed[..., :32] + self.first(self.both(x.view(-1, 2, 64)).view(x.shape))

    x = torch.randn(40, 64).bfloat16()
    model = module_of(forward, norm=nn.LayerNorm(64), both=nn.LayerNorm((2, 64)), first=nn.Linear(64, 32))
    converted, _, rows = with_rows(model, x)
    assert count(rows, layer_norm_fp8_rows) == 1 and count(rows, quantize_fp8_rows) == 1
    assert relative_error(rows(x), converted(x)) < 4e-3


def test_what_is_added_before_a_norm_is_read_before_it_is_written():
    def forward(self, x):
        y = self.first(x)
        summed = x + y
        y.mul_(3)
        return self.second(self.norm(summed)) + y

    x = torch.randn(40, 64).bfloat16()
    model = module_of(forward, first=nn.Linear(64, 64), norm=nn.LayerNorm(64), second=nn.Linear(64, 64))
    converted, _, rows = with_rows(model, x)
    assert count(rows, mm_fp8_rows) == 2 and calls(rows, layer_norm_fp8_rows)[0].args[1] is None
    assert relative_error(rows(x), converted(x)) < 4e-3


@pytest.mark.compiled
def test_compiled_without_cuda_graphs(monkeypatch):
    """Inductor decomposes the calls, and makes no FP8 rows."""
    monkeypatch.setattr(inductor, "_calls_are_cheap", lambda x: False)
    x = torch.randn(40, 64).bfloat16()
    converted, _, rows = with_rows(FeedForward(), x)
    with torch.no_grad():
        found, (code, *_) = run_and_get_code(torch.compile(rows), x)
    assert "_fp8_rows.default" not in code
    assert relative_error(found, converted(x)) < 2e-2


def test_queries_keys_and_values_are_quantized_by_a_call(monkeypatch):
    forced = everywhere(use_fp8_rowwise)
    steps = [step._replace(graph_pass=forced) if step.graph_pass is use_fp8_rowwise else step for step in lower.PASSES]
    monkeypatch.setattr(lower, "PASSES", steps)
    monkeypatch.setattr(fuse_activation_quantize, "_MIN_VALUES", 0)
    monkeypatch.setitem(USES, "quantize activations", {"cpu": "gpu.uses:quantizes_rows"})
    monkeypatch.setitem(USES, "quantize activations alone", {})
    x = torch.randn(2, 20, 64).bfloat16()
    converted = convert(SelfAttention().bfloat16(), (x,), "mxfp4")
    rows = lower_to_inductor(converted, unpack=True)
    assert count(rows, mm_fp8_rows) == 1 and count(rows, activation_fake_quantize_mx) == 1
    assert not count(rows, ops.fake_quantize_mx)
    assert relative_error(rows(x), converted(x)) < 4e-3


def test_dynamic_rows_and_export_again():
    x = torch.randn(40, 64).bfloat16()
    converted, _, rows = with_rows(FeedForward(), x, shapes=BATCH)
    program = torch.export.export(rows, (x,), dynamic_shapes=BATCH)
    for n in (40, 7):
        assert relative_error(program.module()(x[:n]), converted(x[:n])) < 4e-3


def test_nothing_changes_without_a_gpu():
    converted = convert(FeedForward().bfloat16(), (torch.randn(300, 64).bfloat16(),), "mxfp4")
    assert not count(lower_to_inductor(converted, unpack=True), mm_fp8_rows)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp6"])
def test_a_compiled_layer_on_a_gpu(recipe):
    x = torch.randn(2, 200, 1024).bfloat16()
    converted = convert(FeedForward(1024).bfloat16(), (x,), recipe)
    rows, x = lower_to_inductor(converted, "cuda", unpack=True), x.cuda()
    assert [count(rows, target) for target in ROWS] == [2, 1, 3]
    want = converted(x.cpu())
    for compiled in (rows, torch.compile(rows, mode="reduce-overhead")):
        for _ in range(3):
            got = compiled(x).clone()
            assert relative_error(got.cpu(), want) < 2e-2  # some activations round to other codes
