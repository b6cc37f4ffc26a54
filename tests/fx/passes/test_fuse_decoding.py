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
from tests.every_device import everywhere
from tests.graph import calls
from tests.language_models import decoder_by_recipe, round_weights, tiny_decoder
from tests.models import module_of

aten = torch.ops.aten
TOKENS = torch.tensor([[7], [200]])
#: family -> layers with a norm or gate, with a residual sum, and others
FUSED = {"llama": (4, 4, 1), "qwen2": (4, 4, 1), "qwen3": (4, 4, 1), "phi3": (4, 4, 1), "smollm3": (4, 4, 1)}
FUSED |= {"gemma2": (2, 0, 7), "mixtral": (0, 0, 7), "opt": (0, 0, 9)}
#: they fuse like Llama
_LIKE_LLAMA = ("qwen3", "smollm3")
EACH = [pytest.param(family, marks=[pytest.mark.slow] if family in _LIKE_LLAMA else []) for family in FUSED]


@functools.cache
def laid_out(family):
    """A bfloat16 decoder whose weights are in the MMA layout, and the logits of two steps."""
    model = decoder_by_recipe("mxfp4_weight_only", family, dtype="bfloat16")
    graph = copy_sharing_tensors(model.decoder)
    everywhere(interleave_gates)(graph)
    return model, everywhere(use_mma_layout)(graph)


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


@pytest.mark.slow_cases("qwen2", "phi3", "opt", "mixtral")
@pytest.mark.parametrize("family", EACH)
@pytest.mark.compiled_cases("gemma2")
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
        everywhere(use_mma_layout)(everywhere(interleave_gates)(graph))
        assert torch.equal(graph(x), want)
        fuse_decoding(graph)
        (node,) = calls(graph, normed_linear_mx)
        assert node.args[8] == "silu" and node.meta["val"].shape == (3, 16)
        torch.testing.assert_close(graph(x), want, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("change", ["gate is used twice", "a weight is used twice", "7 columns"])
def test_skipped_gates(change):
    rows = 14 if change == "7 columns" else 32
    scale, data = torch.ops.pt2mx.quantize_mx(torch.randn(rows, 64), "fp8_e4m3", 32, 1, "floor", "even")

    def forward(self, x):
        y = linear_mx(x, self.data, self.scale, None, "fp8_e4m3", 32, 0)
        one, other = y[..., : rows // 2], y[..., rows // 2 :]
        gated = torch.nn.functional.silu(one) * other
        if change == "gate is used twice":
            return gated + one
        if change == "a weight is used twice":
            return gated, linear_mx(x + 1, self.data, self.scale, None, "fp8_e4m3", 32, 0)
        return gated

    model = module_of(forward, data=torch.nn.Buffer(data), scale=torch.nn.Buffer(scale))
    graph = torch.export.export(model, (torch.randn(3, 64).bfloat16(),)).module()
    before = graph.code
    assert everywhere(interleave_gates)(graph).code == before


def test_a_layer_that_something_else_reads():
    _, plain = laid_out("llama")
    graph = copy_sharing_tensors(plain)
    first = graph.graph.find_nodes(op="call_function", target=linear_mx_mma_layout)[1]  # of the first residual sum
    with graph.graph.inserting_after(first):
        graph.graph.call_function(aten.index_copy_.default, (first, 1, torch.tensor([0]), first))
    fuse_decoding(graph)
    assert first in graph.graph.nodes and len(calls(graph, residual_linear_mx)) == 3


class Layer(torch.nn.Module):
    """A linear layer whose weight is packed."""

    def __init__(self, rows=64, bias=torch.bfloat16):
        super().__init__()
        scale, data = torch.ops.pt2mx.quantize_mx(torch.randn(rows, 64), "fp8_e4m3", 32, 1, "floor", "even")
        self.data, self.scale = torch.nn.Buffer(data), torch.nn.Buffer(scale)
        self.bias = torch.nn.Buffer(torch.randn(rows, dtype=bias))

    def forward(self, x):
        bias = self.bias if self.bias.dtype == x.dtype else self.bias.to(x.dtype)
        return linear_mx(x, self.data, self.scale, bias, "fp8_e4m3", 32, 0)


class Block(torch.nn.Module):
    """Two layers, the weight of a norm, and a function that calls them."""

    def __init__(self, call, **options):
        super().__init__()
        torch.manual_seed(0)
        self.call, self.first, self.second = call, Layer(**options), Layer()
        self.weight = torch.nn.Buffer(torch.randn(64).bfloat16())

    def forward(self, x):
        return self.call(self, x)


def norm(x, weight):
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def gated(halves):
    return torch.nn.functional.silu(halves[0]) * halves[1]


def with_x_written(call):
    def written(block, x):
        x = x + 1
        y = block.first(x)
        x.mul_(2)
        return call(block, x, y)

    return written


def fused(call, **options):
    """The fused graph and its result, after a comparison with the graph before."""
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    graph = torch.export.export(Block(call, **options), (x,)).module()
    want = graph(x).float()
    everywhere(use_mma_layout)(everywhere(interleave_gates)(graph))
    for _ in range(2):
        assert (graph(x).float() - want).norm() <= 2**-7 * want.norm()
        fuse_decoding(graph)
    return graph


@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: block.second(norm(x + block.first(x), block.weight)),
        lambda block, x: block.second(norm(block.first(x) + x, block.weight)[:, -1:]),
        lambda block, x: block.second(norm(block.first(x) + block.second(x), block.weight)),
        lambda block, x: block.second(torch.nn.functional.rms_norm(x + block.first(x), (64,), block.weight, 1e-5)),
    ],
)
def test_norms(call):
    graph = fused(call)
    assert len(calls(graph, normed_linear_mx)) == len(calls(graph, residual_linear_mx)) == 1


@pytest.mark.parametrize(
    "call",
    [
        with_x_written(lambda block, x, y: block.second(norm(x + y, block.weight))),
        lambda block, x: block.second(norm((y := block.first(x)) + y, block.weight)),
        lambda block, x: block.second(norm(x[:1] + block.first(x), block.weight)),
        lambda block, x: block.second(norm(x + block.first(x[:1]), block.weight)),
        lambda block, x: block.second(norm(torch.add(x, block.first(x), alpha=2), block.weight)),
        lambda block, x: block.second(norm((x.float() + block.first(x)), block.weight.float()).bfloat16()),
        lambda block, x: block.second(norm(x + block.first(x), block.weight.float()).bfloat16()),
        lambda block, x: block.second(y := norm(x + block.first(x), block.weight)) + y,
        lambda block, x: block.second(norm(x + block.first(x), 1 + block.weight)),
    ],
)
def test_skipped_norms(call):
    graph = fused(call)
    assert not calls(graph, residual_linear_mx) and not calls(graph, normed_linear_mx)


@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: gated(block.first(x).chunk(2, 2)),
        lambda block, x: gated(((y := block.first(x))[..., :32], y[..., 32:])),
        lambda block, x: gated(((y := block.first(x))[..., 32:], y[..., :32])),
    ],
)
def test_gates(call):
    graph = fused(call)
    assert [node.args[8] for node in calls(graph, normed_linear_mx)] == ["silu"]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (with_x_written(lambda block, x, y: gated(y.chunk(2, -1))), {}),
        (lambda block, x: gated(block.first(x).chunk(2, -1)), {"bias": torch.float32}),
        (lambda block, x: gated(((y := block.first(x))[..., 0:32:2], y[..., 32:64:2])), {}),
        (lambda block, x: gated((aten.slice.Tensor(y := block.first(x)), aten.slice.Tensor(y, 1))), {}),
        (lambda block, x: gated([t.flatten(-2) for t in block.first(x).unflatten(-1, (2, 4, 8)).unbind(-3)]), {}),
        (
            lambda block, x: gated([block.first(x).unflatten(-1, (2, 4, 8))[..., i, :, :].flatten(-2) for i in (0, 1)]),
            {},
        ),
        (lambda block, x: gated([(y := block.first(x).unflatten(-1, (32, 2)))[..., 0].neg(), y[..., 1].neg()]), {}),
    ],
)
def test_what_is_no_gate(call, options):
    assert not calls(fused(call, **options), normed_linear_mx)
