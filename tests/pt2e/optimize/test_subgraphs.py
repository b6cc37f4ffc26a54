"""Weights that subgraphs read: conditions, loops and others."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, optimization_report
from tests.models import module_of
from tests.subgraph_models import MODELS, QUANTIZER, Base, Nested, Repeated, ViewedWeight


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 64, generator=generator) @ torch.randn(64, 64, generator=generator) / 8


@torch.no_grad()
def error(model, quantizer, x, want):
    """Return the error of the converted model, after checking that it equals the prepared one to the bit."""
    prepared = pt2mx.prepare_pt2e(model, quantizer)
    prepared(x)
    converted = pt2mx.convert_pt2e(prepared)(x)
    pt2mx.enable_fake_quant(prepared)
    assert torch.equal(prepared(x), converted)
    return float((converted - want).square().sum() / want.square().sum())


@torch.no_grad()
def optimized_of(model, x):
    """Return the optimized model, the rows of its report, and its error over that of rounding to nearest."""
    optimized, want = pt2mx.optimize(model, QUANTIZER, [(x,)]), model(x)
    share = error(optimized, QUANTIZER, x, want) / error(model, QUANTIZER, x, want)
    return optimized, optimization_report(optimized).weights, share


@pytest.mark.compiled_cases("WhileLoop", "Autocast")
@pytest.mark.slow_cases("Nested", "Scan", "Map")
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_come_nearer(kind):
    torch.manual_seed(0)
    x = inputs()
    model = torch.export.export(kind().eval(), (x,)).module()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        want = model(x)
        optimized = pt2mx.optimize(model, QUANTIZER, [(x,)])
        exported = torch.export.export(optimized, (x,)).module()
        assert torch.equal(exported(x), optimized(x))
        assert torch.equal(model(x), want)
    bound = 0.6 if kind is ViewedWeight else 0.35
    assert error(optimized, QUANTIZER, x, want) < bound * error(model, QUANTIZER, x, want)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    inner, outer = optimization_report(optimized).weights
    assert (inner.weight, outer.weight) == ("inner.weight", "outer.weight") and outer.algorithm == "gptq"
    if kind is Nested:  # it is reduced along both of its dimensions
        assert inner.reason == "its operators quantize it in different ways"
    else:
        assert inner.algorithm == "gptq" and inner.after < 0.6 * inner.before
        assert inner.rotated == (0 if kind is ViewedWeight else 32)


@pytest.mark.parametrize("inside", [True, False])
def test_a_weight_that_a_subgraph_or_the_graph_around_also_reads_unquantized(inside):
    class Penalized(Base):
        def apply_inner(self, x):
            with torch.no_grad():
                y = self.inner(x) + self.inner.weight.abs().mean() if inside else self.inner(x)
            return y if inside else y + self.inner.weight.abs().mean()

    torch.manual_seed(0)
    x = inputs()
    model = torch.export.export(Penalized().eval(), (x,)).module()
    optimized, (row, *_), share = optimized_of(model, x)
    assert torch.equal(optimized.get_parameter("inner.weight"), model.get_parameter("inner.weight"))
    if inside:
        assert row.reason == "a subgraph also reads it in high precision"
    else:
        assert row.algorithm == "gptq" and share < 0.5  # in its own buffer


def test_one_graph_for_two_weights():
    torch.manual_seed(0)
    x = inputs()
    _, rows, share = optimized_of(torch.export.export(Repeated().eval(), (x,), strict=True).module(), x)
    # the last has its own subgraph
    assert [(row.algorithm, row.rotated) for row in rows] == [("gptq", 0), ("gptq", 0), ("gptq", 32)]
    assert share < 0.7


def test_rotated_attention_and_a_padding_mask():
    def forward(self, x, mask):
        with torch.no_grad():
            y = self.project(x)
            return nn.functional.scaled_dot_product_attention(y, y * 2, x)

    torch.manual_seed(0)
    x, mask = inputs().reshape(4, 16, 64), torch.ones(4, 16, dtype=torch.int64)
    model = torch.export.export(module_of(forward, project=nn.Linear(64, 64)).eval(), (x, mask)).module()
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation="mxfp4"))
    algorithms = pt2mx.algorithms.Rotation(attention=True), pt2mx.algorithms.GPTQ()
    optimized = pt2mx.optimize(model, quantizer, [(x, mask)], algorithms=algorithms, padding_mask="mask")
    (inner,) = [graph for _, graph in optimized.named_children() if isinstance(graph, torch.fx.GraphModule)]
    rotations = inner.graph.find_nodes(op="call_function", target=torch.ops.pt2mx.hadamard.default)
    assert len(rotations) == 3  # of the layer's input, queries and keys
    assert torch.allclose(optimized(x, mask), model(x, mask), atol=0.1)


def exported(forward, x):
    """A model of two weights, (64, 64), exported."""
    torch.manual_seed(0)
    net = module_of(forward, first=nn.Parameter(torch.randn(64, 64) / 8), second=nn.Parameter(torch.randn(64, 64) / 8))
    return torch.export.export(net.eval(), (x,)).module()


def times_itself(model, x):
    with torch.no_grad():
        return x + nn.functional.linear(model.first, model.first)


def plus_itself(model, x):
    with torch.no_grad():
        return torch.addmm(model.first, x, model.first)


def plus_itself_outside(model, x):
    return torch.addmm(model.first, x, model.first)


@pytest.mark.parametrize("forward", [times_itself, plus_itself, plus_itself_outside])
def test_a_weight_that_its_matmul_also_reads_unquantized(forward):
    x = inputs()
    model = exported(forward, x)
    optimized = pt2mx.optimize(model, QUANTIZER, [(x,)])
    assert torch.equal(optimized(x), model(x))
    assert optimization_report(optimized).weights[0].reason.startswith("an operator quantizes it and also reads it")


def test_one_value_in_both_branches():
    x = inputs()

    def branches(model, x):
        return torch.cond(x.sum() > 0, lambda x: x @ model.first.t(), lambda x: x @ model.first.t() + 1, (x,))

    with torch.no_grad():
        optimized, _, share = optimized_of(exported(branches, x), x)
        assert torch.equal(torch.export.export(optimized, (x,)).module()(x), optimized(x)) and share < 0.5


def test_autocast_regions_stay_subgraphs():
    def matmul(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ (model.first @ model.second)).float()

    x = inputs()
    optimized_of(exported(matmul, x), x)  # checks that converted equals prepared


def test_a_weight_that_is_computed_two_graphs_deep():
    def deep(model, x):
        def inner(x):
            with torch.no_grad():
                return x @ model.first.t()

        return torch.cond(x.sum() > 0, inner, lambda x: x + 1, (x,))

    x = inputs().abs()
    _, (row,), share = optimized_of(exported(deep, x), x)
    assert (row.weight, row.algorithm) == ("first", "gptq") and share < 0.6


def test_an_outer_user_is_rounded_where_a_subgraph_reads_unquantized():
    def carried(model, x):
        scale = torch.cond(x.sum() > 0, lambda w: w.abs().mean(), lambda w: w.abs().amax(), (model.first,))
        return nn.functional.linear(x, model.first) * scale

    x = inputs()
    model = exported(carried, x)
    optimized, (row, *_), share = optimized_of(model, x)
    assert row.algorithm == "gptq" and share < 0.6
    assert torch.equal(optimized.get_parameter("first"), model.get_parameter("first"))
