"""Attention quantizes its result before it stores it: on the CPU, also with the rules of a GPU, and on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor, ops
from pt2mx.fx.passes import fuse_activation_quantize
from pt2mx.fx.passes.fuse_quantize_epilogue import fuse_quantize_epilogue
from pt2mx.kernels.cpu import uses
from pt2mx.ops.attention import attention_bfloat16
from pt2mx.ops.linear import linear_mx
from tests.attention import attend
from tests.compare import relative_error, same
from tests.flow import convert, lowered_without
from tests.graph import calls, count, namespaces

X = torch.randn(2, 20, 96)


@pytest.fixture(autouse=True)
def with_bfloat16_instructions(monkeypatch):
    """Run the pass on every machine: torch computes the calls without bfloat16 instructions."""
    monkeypatch.setattr(uses, "bf16_matmul", SimpleNamespace(bf16_isa=lambda: 4))
    monkeypatch.setattr(uses, "MIN_MULTIPLIES", 1)
    monkeypatch.setattr(fuse_activation_quantize, "_MIN_VALUES", 1)


class Attention(nn.Module):
    def __init__(self, width=32, merge=None, heads=3):
        super().__init__()
        self.heads, self.merge = heads, merge or (lambda y: y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1))
        self.up, self.down = nn.Linear(96, 3 * heads * width), nn.Linear(heads * width, 96)

    def forward(self, x):
        q, k, v = self.up(x).view(x.shape[0], x.shape[1], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.read(self.merge(F.scaled_dot_product_attention(q, k, v)))

    def read(self, y):
        return self.down(y)


def lowered(model, x=X, name="mxfp8", shapes=None, **options):
    """Return the lowered model with and without the pass."""
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(name, name))
    converted = convert(model.to(x.dtype), (x,), quantizer, shapes=shapes)
    return lower_to_inductor(converted, **options), lowered_without(fuse_quantize_epilogue, converted, **options)


def modes(model):
    (attention,) = calls(model, attention_bfloat16)
    return attention.args[7:]


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mxfp8", "mxint8", "mxfp4", "mxfp6_e3m2"])
def test_the_result_is_quantized(name, dtype):
    model, before = lowered(Attention(), X.to(dtype), name)
    element = pt2mx.parse(name).element.name
    assert modes(model)[:4] == (element, 32, "floor", "even") and modes(before)[0] is None
    assert calls(model, attention_bfloat16)[0].meta["val"].dtype == modes(model)[4]
    assert len(model.graph.nodes) == len(before.graph.nodes) - 1
    assert same(model(X.to(dtype)), before(X.to(dtype)))


@pytest.mark.parametrize(
    "merge",
    [
        lambda y: y.transpose(1, 2).contiguous().view(2, 20, -1),
        lambda y: y.transpose(2, 1).flatten(2),
        lambda y: y.transpose(-2, -3).clone(memory_format=torch.contiguous_format).reshape(2, 20, 96),
    ],
)
def test_other_ways_of_merging_heads(merge):
    model, before = lowered(Attention(merge=merge))
    assert modes(model)[0] == "fp8_e4m3" and same(model(X), before(X))


def test_dynamic_shapes():
    batch = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    model, before = lowered(Attention(), shapes=batch)
    assert modes(model)[0] == "fp8_e4m3"
    for x in (X, torch.randn(3, 33, 96)):
        assert same(model(x), before(x))


def test_a_cast_of_the_quantized_values(monkeypatch):
    """As on a GPU, where Inductor would quantize attention's result, and matmuls read bfloat16."""
    monkeypatch.setattr(fuse_activation_quantize, "_MIN_VALUES", 1 << 60)
    monkeypatch.setattr("pt2mx.fx.passes.bf16_matmul._is_faster_in_bf16", lambda *args: False)
    monkeypatch.setattr("pt2mx.fx.passes.bf16_matmul._runs_on_tensor_cores", lambda *args: True)
    model, before = lowered(Attention())
    assert modes(model) == ("fp8_e4m3", 32, "floor", "even", torch.bfloat16)
    assert count(before, ops.fake_quantize_mx) == count(model, ops.fake_quantize_mx) + 1
    assert calls(model, linear_mx)[-1].args[0].target is torch.ops.aten.reshape.default
    assert same(model(X), before(X))


@pytest.mark.parametrize(("dtype", "taken"), [(torch.float16, True), (torch.float64, False)])
def test_casts_to_dtypes_that_the_operator_gives(dtype, taken):
    def run(query):
        y = attend(query, query, query).transpose(1, 2).reshape(2, 20, 96)
        return torch.ops.aten.to.dtype(
            ops.fake_quantize_mx(y, "int8", 32, -1, "floor", "even", None, "identity"), dtype
        )

    query = torch.randn(2, 3, 20, 32)
    model = make_fx(run, tracing_mode="fake", pre_dispatch=True)(query)
    want = model(query)
    fuse_quantize_epilogue(model)
    assert modes(model)[4] == (dtype if taken else torch.float32) and torch.equal(model(query), want)


class Twice(Attention):
    def read(self, y):
        return self.down(y) + y


class Written(Attention):
    def read(self, y):
        y.mul_(2)
        return self.down(y)


class Activated(Attention):
    def read(self, y):
        return self.down(torch.relu(y))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Attention(width=40), "mxfp8"),
        (Attention(merge=lambda y: y.reshape(2, 20, -1)), "mxfp8"),  # not the heads of a token
        (Attention(width=64), "mxfp8{64}"),
        (Attention(), "mxfp8(mse)"),
        (Attention(), "mxfp8(floor,half_away)"),
        (Twice(), "mxfp8"),
        (Written(), "mxfp8"),
        (Activated(), "mxfp8"),
    ],
)
def test_what_stays(model, name):
    found, before = lowered(model, name=name)
    assert all(attention.args[7] is None for attention in calls(found, attention_bfloat16))
    assert same(found(X), before(X))


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
def test_compiled_and_portable():
    model, _ = lowered(Attention(), name="mxint8")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(X), model(X), rtol=0.02, atol=0.02)
    portable = pt2mx.make_portable(torch.export.export(model, (X,))).module()
    assert "pt2mx" not in namespaces(portable)
    torch.testing.assert_close(portable(X), model(X), rtol=0.02, atol=0.02)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("unpack", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype, unpack, mode, compiler):
    """A call that quantizes, but without CUDA graphs in bfloat16, where Inductor generates the quantization."""
    x = X.to(dtype)
    model, before = lowered(Attention(), x, "mxfp8", device="cuda", unpack=unpack)
    assert modes(model)[:4] == ("fp8_e4m3", 32, "floor", "even") and modes(before)[0] is None
    x, compiled = x.cuda(), torch.compile(model, mode=mode)
    with torch.no_grad():
        want = before(x)
        assert modes(model)[4] == torch.bfloat16 and same(model(x), want)
        for _ in range(3):
            assert relative_error(compiled(x), want) < 0.03  # values that round to the other neighbour
