"""`fuse_decoding` and `interleave_gates` on tiny decoders: the graph, and values no further from float32."""

import functools

import pytest
import torch

from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.fuse_decoding import fuse_decoding
from pt2mx.fx.passes.interleave_gates import interleave_gates
from pt2mx.fx.passes.weight_layout import use_mma_layout
from pt2mx.ops.decoding import normed_linear_mx, residual_linear_mx
from pt2mx.ops.linear import linear_mx, linear_mx_mma_layout
from tests.graph import calls
from tests.language_models import decoder_by_recipe, round_weights, tiny_decoder

aten = torch.ops.aten
TOKENS = torch.tensor([[7], [200]])
#: family -> layers with a norm or gate, with a residual sum, and others
FUSED = {"llama": (4, 4, 1), "qwen2": (4, 4, 1), "qwen3": (4, 4, 1), "phi3": (4, 4, 1), "smollm3": (4, 4, 1)}
FUSED |= {"gemma2": (2, 0, 7), "mixtral": (0, 0, 7), "opt": (0, 0, 9)}


@functools.cache
def laid_out(family):
    """A bfloat16 decoder whose weights are in the MMA layout, and the logits of two steps."""
    model = decoder_by_recipe("mxfp4_weight_only", family, dtype="bfloat16")
    graph = copy_sharing_tensors(model.decoder)
    interleave_gates(graph, everywhere=True)
    return model, use_mma_layout(graph, everywhere=True)


def two_steps(model, graph):
    """The logits of a second token."""
    cache = model.new_cache(2, 8)
    for start in range(2):
        logits = graph(
            input_ids=TOKENS + start,
            position_ids=torch.full((2, 1), start),
            attention_mask=torch.ones(2, cache.slots, dtype=torch.long),
            start=torch.tensor([start]),
            logits_to_keep=torch.tensor([0]),
            **cache.inputs(),
        )
    return logits.float()


@pytest.mark.parametrize("family", FUSED)
def test_decoders(family):
    model, plain = laid_out(family)
    want = two_steps(model, model.decoder)
    assert torch.equal(two_steps(model, plain), want)  # the order of rows changes no value
    fused = fuse_decoding(copy_sharing_tensors(plain))
    counts = tuple(len(calls(fused, op)) for op in (normed_linear_mx, residual_linear_mx, linear_mx_mma_layout))
    assert counts == FUSED[family] and not calls(fused, linear_mx)
    got = two_steps(model, fused)
    assert (got - want).norm() <= 2**-6 * want.norm()
    for node in fused.graph.nodes:
        assert node.target not in (normed_linear_mx, residual_linear_mx) or "val" in node.meta
    assert plain.graph.find_nodes(op="call_function", target=linear_mx_mma_layout)  # the copy changed alone


def test_no_further_from_float32():
    model, plain = laid_out("llama")
    exact = round_weights(tiny_decoder("llama"))
    exact = exact(torch.cat([TOKENS, TOKENS + 1], 1)).logits[:, 1:]
    errors = [(two_steps(model, g) - exact).norm() for g in (plain, fuse_decoding(copy_sharing_tensors(plain)))]
    assert errors[1] <= 1.1 * errors[0]


def test_gates_of_chunks_and_of_either_half():
    class Gated(torch.nn.Module):
        def __init__(self, second):
            super().__init__()
            self.second = second
            weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
            self.scale, self.data = (torch.nn.Buffer(t) for t in torch.ops.pt2mx.quantize_mx(
                weight, "fp8_e4m3", 32, 1, "floor", "even"))  # fmt: skip
            self.bias = torch.nn.Buffer(torch.randn(32).bfloat16())

        def forward(self, x):
            one, other = linear_mx(x, self.data, self.scale, self.bias, "fp8_e4m3", 32, 0).chunk(2, -1)
            silu = torch.nn.functional.silu
            return one * silu(other) if self.second else silu(one) * other

    x = torch.randn(3, 64).bfloat16()
    for second in (False, True):
        graph = torch.export.export(Gated(second), (x,)).module()
        want = graph(x)
        use_mma_layout(interleave_gates(graph, everywhere=True), everywhere=True)
        assert torch.equal(graph(x), want)
        fuse_decoding(graph)
        (node,) = calls(graph, normed_linear_mx)
        assert node.args[8] == "silu" and node.meta["val"].shape == (3, 16)
        torch.testing.assert_close(graph(x), want, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("change", ["gate is used twice", "a weight is used twice", "7 columns"])
def test_skipped_gates(change):
    rows = 14 if change == "7 columns" else 32
    scale, data = torch.ops.pt2mx.quantize_mx(torch.randn(rows, 64), "fp8_e4m3", 32, 1, "floor", "even")

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.data, self.scale = torch.nn.Buffer(data), torch.nn.Buffer(scale)

        def forward(self, x):
            y = linear_mx(x, self.data, self.scale, None, "fp8_e4m3", 32, 0)
            one, other = y[..., : rows // 2], y[..., rows // 2 :]
            gated = torch.nn.functional.silu(one) * other
            if change == "gate is used twice":
                return gated + one
            if change == "a weight is used twice":
                return gated, linear_mx(x + 1, self.data, self.scale, None, "fp8_e4m3", 32, 0)
            return gated

    graph = torch.export.export(Gated(), (torch.randn(3, 64).bfloat16(),)).module()
    before = graph.code
    assert interleave_gates(graph, everywhere=True).code == before


def test_a_layer_that_something_else_reads():
    _, plain = laid_out("llama")
    graph = copy_sharing_tensors(plain)
    first = graph.graph.find_nodes(op="call_function", target=linear_mx_mma_layout)[1]  # of the first residual sum
    with graph.graph.inserting_after(first):
        graph.graph.call_function(aten.index_copy_.default, (first, 1, torch.tensor([0]), first))
    fuse_decoding(graph)
    assert first in graph.graph.nodes and len(calls(graph, residual_linear_mx)) == 3
