"""Matmuls of two quantized activations, and attention over them, use bfloat16 instructions."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor
from pt2mx.kernels.cpu import uses
from pt2mx.ops.attention import attention_bfloat16, matmul_bfloat16
from tests.flow import convert
from tests.graph import calls, count, namespaces
from tests.models import module_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def with_bfloat16_instructions(monkeypatch):
    """Run the pass on every machine: torch computes the calls without bfloat16 instructions."""
    monkeypatch.setattr(uses, "MIN_MULTIPLIES", 1 << 10)
    monkeypatch.setattr(uses, "bf16_matmul", SimpleNamespace(bf16_isa=lambda: 4))


def quantizer(matmul, name="mxfp8"):
    return MXQuantizer().set_operator_type(matmul, get_default_mx_quantization_config(name, name))


def lowered(function, *inputs, matmul="aten.matmul", name="mxfp8", shapes=None):
    net = module_of(lambda self, *given: function(*given))
    converted = convert(net, inputs, quantizer(matmul, name), shapes=shapes)
    return converted, lower_to_inductor(converted)


def check(converted, model, operator, *inputs, calls=1):
    assert count(model, operator) == calls
    torch.testing.assert_close(model(*inputs), converted(*inputs), rtol=1e-5, atol=1e-5)


ATTENTION = "aten.scaled_dot_product_attention"
X, Y = torch.randn(2, 3, 20, 32), torch.randn(2, 3, 30, 32)


@pytest.mark.parametrize("name", ["mxfp8", "mxint8", "mxfp4", "mxfp6_e3m2"])
def test_matmul(name):
    converted, model = lowered(lambda x, y: x @ y.mT, X, Y, name=name)
    check(converted, model, matmul_bfloat16, X, Y)
    assert not count(model, aten.matmul.default)


@pytest.mark.parametrize(
    ("function", "x", "y", "matmul"),
    [
        (torch.bmm, X[0], Y[0].mT, "aten.bmm"),
        (torch.mm, X[0, 0], Y[0, 0].mT, "aten.mm"),
        (lambda x, y: torch.relu(x).contiguous() @ y.transpose(-1, -2), X, Y, "aten.matmul"),
        (lambda x, y: x @ y, X[0], Y[0].mT, "aten.matmul"),
    ],
)
def test_other_forms(function, x, y, matmul):
    check(*lowered(function, x, y, matmul=matmul), matmul_bfloat16, x, y)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    value = torch.randn(2, 3, 30, 16)
    converted, model = lowered(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(2, 20, 48),
        *(X, Y, value),
        matmul=ATTENTION,
    )
    check(converted, model, attention_bfloat16, X, Y, value)
    assert not count(model, aten.scaled_dot_product_attention.default)


@pytest.mark.parametrize("mask", [None, torch.rand(20, 30) < 0.7, torch.randn(2, 1, 1, 30).bfloat16()])
def test_attention_of_bfloat16_models(mask):
    given = [X.bfloat16(), Y.bfloat16(), *([] if mask is None else [mask])]
    converted, model = lowered(lambda q, k, *m: F.scaled_dot_product_attention(q, k, k, *m), *given, matmul=ATTENTION)
    (call,) = calls(model, attention_bfloat16)
    assert call.args[6] == torch.bfloat16 and call.meta["val"].dtype == torch.bfloat16
    torch.testing.assert_close(model(*given), converted(*given), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("mask", [torch.rand(20, 30) < 0.7, torch.randn(2, 1, 1, 30)])
def test_masks_and_grouped_heads(mask):
    query = torch.randn(2, 6, 20, 32)
    converted, model = lowered(
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m, scale=0.3, enable_gqa=True),
        query,
        Y,
        mask,
        matmul=ATTENTION,
    )
    check(converted, model, attention_bfloat16, query, Y, mask)


def test_eager_attention_in_two_matmuls():
    def attend(q, k, v):
        return torch.softmax(q @ k.mT * 0.2, -1) @ v

    converted, model = lowered(attend, X, Y, Y)
    check(converted, model, matmul_bfloat16, X, Y, Y, calls=2)


def test_dynamic_shapes():
    shapes = {"given": ({0: torch.export.Dim.DYNAMIC},)}
    converted, model = lowered(lambda q: F.scaled_dot_product_attention(q, q, q), X, matmul=ATTENTION, shapes=shapes)
    for n in (2, 5):
        x = torch.randn(n, 3, 20, 32)
        check(converted, model, attention_bfloat16, x)


@pytest.mark.parametrize(
    ("function", "inputs", "matmul"),
    [
        (lambda x, y: x @ y.mT, (X.bfloat16(), Y.bfloat16()), "aten.matmul"),  # another dtype
        (lambda x, y: x @ y[0, 0].mT, (X, Y), "aten.matmul"),  # broadcast
        (lambda x, y: F.scaled_dot_product_attention(x, y[:1], y[:1]), (X, Y), ATTENTION),
        (lambda x, y: F.scaled_dot_product_attention(x[0], y[0], y[0]), (X, Y), ATTENTION),  # of three dimensions
        (lambda x, y: F.scaled_dot_product_attention(x[:, :, :9], y, y), (X, Y), ATTENTION),  # of a few queries
        (lambda x, y: F.scaled_dot_product_attention(x, y, y), (X.half(), Y.half()), ATTENTION),
        (lambda x, y: torch.softmax(x @ y.mT, -1) + torch.bmm(x[0], y[0].mT), (X, Y), "aten.bmm"),  # not quantized
    ],
)
def test_what_stays(function, inputs, matmul):
    converted, model = lowered(function, *inputs, matmul=matmul)
    assert count(model, matmul_bfloat16) == (matmul == "aten.bmm") and not count(model, attention_bfloat16)
    torch.testing.assert_close(model(*inputs), converted(*inputs))


def test_values_that_the_graph_writes_stay():
    """bfloat16 may not represent a quantized tensor after a write to it, before or after the matmul."""
    graph = lowered(lambda x, y: x @ y.mT, X, Y)[0]
    (matmul,) = graph.graph.find_nodes(op="call_function", target=aten.matmul.default)
    quantized = matmul.args[0]
    with graph.graph.inserting_after(quantized):
        graph.graph.call_function(aten.mul_.Scalar, (quantized, 1.2345678))
    graph.recompile()
    model = lower_to_inductor(graph)
    assert not count(model, matmul_bfloat16)
    assert torch.equal(model(X, Y), graph(X, Y))


def through_a_view(y):
    y.view(2, 60, 32).mul_(2)
    return y


def to_a_copy(y):
    """Copy; with the heads next to each other this would be a view."""
    rows = y.transpose(1, 2).reshape(2, 20, 96)
    rows.mul_(2)
    return y, rows


def behind_a_copy(y):
    rows = y.transpose(1, 2).reshape(2, 20, 96)
    y.mul_(2)
    return rows


def in_place(y):
    y[:, 1] = 5.0
    return y.transpose(1, 2)


@pytest.mark.parametrize(
    ("read", "calls"),
    [
        (through_a_view, 0),
        (to_a_copy, 0),
        (behind_a_copy, 0),
        (lambda y: y.as_strided((2, 60, 32), (1920, 32, 1)), 0),
        (in_place, 1),
        (lambda y: (y, y.transpose(1, 2).flatten(2), y.view(2, 3, 640)), 1),
    ],
)
def test_what_is_read_of_attention(read, calls):
    """The outputs have their last values, and their old dimension order."""
    converted, model = lowered(lambda q, k: read(F.scaled_dot_product_attention(q, k, k)), X, Y, matmul=ATTENTION)
    assert count(model, attention_bfloat16) == calls
    got, want = (pytree.tree_leaves(module(X, Y)) for module in (model, converted))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [y.stride() for y in got] == [y.stride() for y in want]


def test_small_matmuls_and_machines_without_bfloat16_instructions_stay(monkeypatch):
    monkeypatch.setattr(uses, "MIN_MULTIPLIES", 1 << 30)
    assert not count(lowered(lambda x, y: x @ y.mT, X, Y)[1], matmul_bfloat16)
    monkeypatch.setattr(uses, "MIN_MULTIPLIES", 1)
    monkeypatch.setattr(uses.bf16_matmul, "bf16_isa", lambda: 0)
    assert not count(lowered(lambda x, y: x @ y.mT, X, Y)[1], matmul_bfloat16)


def test_programs_for_other_processes():
    converted, model = lowered(lambda q: F.scaled_dot_product_attention(q, q, q), X, matmul=ATTENTION)
    assert count(model, attention_bfloat16)
    portable = pt2mx.make_portable(torch.export.export(model, (X,))).module()
    assert "pt2mx" not in namespaces(portable)
    torch.testing.assert_close(portable(X), converted(X), rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
def test_compiled():
    converted, model = lowered(
        lambda q, k: F.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(2, 20, 96), X, Y, matmul=ATTENTION
    )
    torch.testing.assert_close(torch.compile(model)(X, Y), converted(X, Y), rtol=1e-5, atol=1e-5)
