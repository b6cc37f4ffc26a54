"""`fuse_rope` on tiny decoders, with caches of bfloat16 and of codes."""

import functools
from unittest import mock

import pytest
import torch

from pt2mx.fx import lower
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.cache_writes import fuse_cache_writes
from pt2mx.fx.passes.decoding_attention import store_positions, use_decoding_attention
from pt2mx.fx.passes.rotate_and_store import _rotated, fuse_rope
from pt2mx.ops.decoding import decoding_attention
from pt2mx.ops.quantization import quantize_mx
from pt2mx.ops.rope import rotate_and_store, rotate_quantize_and_store
from pt2mx.pt2e.language.runtime import _POSITIONS, lower_program
from tests.every_device import everywhere
from tests.fx.passes.test_decoding_attention import step
from tests.graph import calls
from tests.language_models import decoder_by_recipe, decoder_of_codes
from tests.models import module_of
from tests.pt2mx.ops.test_rope import rotated

aten = torch.ops.aten
#: family -> layers whose rotation is fused, of two; none where attention is no `scaled_dot_product_attention`
FUSED = {"llama": 2, "qwen3": 2, "phi3": 0, "mistral": 2, "gemma2": 0, "gpt2": 0, "gptj": 0, "gpt_neox": 0}
#: format of the cache -> family
OF_CODES = {"mxfp8": "llama", "nvfp4": "llama", "mxint8": "qwen3"}
SLOW = {"mxfp8_e5m2": "llama", "mxfp6_e2m3": "llama", "mxfp6_e3m2": "llama", "mxfp4{16}(rceil)": "mistral"}


@pytest.mark.slow_cases("mistral", "gptj", "phi3", "gpt2")
@pytest.mark.parametrize("family", FUSED)
@pytest.mark.compiled_cases("qwen3", "gemma2", "gpt_neox")
def test_decoders(family):
    model = decoder_by_recipe("mxfp4_weight_only", family, dtype="bfloat16")
    graph = everywhere(use_decoding_attention)(copy_sharing_tensors(model.decoder))
    fuse_rope(graph)
    graph.graph.lint()
    assert len(calls(graph, rotate_and_store)) == FUSED[family]
    assert len(calls(graph, aten.index_copy_.default)) == 2 * (2 - FUSED[family])
    got, want = step(model, graph, 1), step(model, model.decoder, 1)
    assert (got - want).norm() <= 2**-6 * want.norm()
    for node in calls(graph, rotate_and_store):
        assert node.meta["val"].dtype == torch.bfloat16 and node.args[3].op == node.args[4].op == "placeholder"


@pytest.mark.parametrize("reader", ["the cache", "the written cache", "other slots", "keys as values"])
def test_skipped(reader):
    model = decoder_by_recipe("mxfp4_weight_only", "llama", dtype="bfloat16")
    graph = everywhere(use_decoding_attention)(copy_sharing_tensors(model.decoder))
    write = calls(graph, aten.index_copy_.default)[0]
    with graph.graph.inserting_after(write):
        if reader == "the cache":
            graph.graph.call_function(aten.add_.Tensor, (write.args[0], 1))
        elif reader == "the written cache":
            graph.graph.call_function(aten.add_.Tensor, (write, 1))
    if reader == "keys as values":
        attention = calls(graph, decoding_attention)[0]
        attention.update_arg(2, attention.args[1])
    if reader == "other slots":
        with graph.graph.inserting_before(write):
            write.update_arg(2, graph.graph.call_function(aten.neg.default, (write.args[2],)))
    assert len(calls(fuse_rope(graph), rotate_and_store)) == 1  # of the other layer


def test_the_layers_share_slots_and_factors():
    model = decoder_by_recipe("mxfp4_weight_only", "llama", dtype="bfloat16")
    graph = fuse_rope(everywhere(use_decoding_attention)(copy_sharing_tensors(model.decoder)))
    want = step(model, graph, 1)
    assert len({node.args[5] for node in calls(graph, rotate_and_store)}) == 2
    store_positions(graph, _POSITIONS)
    graph.graph.lint()
    first, second = calls(graph, rotate_and_store)
    assert first.args[5:] == second.args[5:] and torch.equal(step(model, graph, 1), want)


def test_a_rotation_of_three_parts():
    class Rotation(torch.nn.Module):
        def forward(self, x, cos, sin):
            first, second, third = x.split(4, -1)
            return x * cos + torch.cat([-third, first, second], -1) * sin

    x = torch.randn(1, 2, 1, 12).bfloat16()
    graph = torch.export.export(Rotation(), (x, x, 2 * x)).module(check_guards=False)
    (total,) = calls(graph, aten.add.Tensor)
    assert _rotated(total) is None


def test_a_rotation_by_another_half():
    x = torch.randn(1, 2, 1, 12).bfloat16()
    net = module_of(lambda self, x, cos, sin: x * cos + torch.cat([-x[..., 2:8], x[..., :6]], -1) * sin)
    graph = torch.export.export(net, (x, x, 2 * x)).module(check_guards=False)
    (total,) = calls(graph, aten.add.Tensor)
    assert _rotated(total) is None


@functools.cache
def over_codes(text, family):
    """Return a tiny decoder over a cache of codes, and its graph without `store_mx`, which only CPUs have."""
    model = decoder_of_codes(text, family)
    others = [one for one in lower.PASSES if one.graph_pass is not fuse_cache_writes]
    with mock.patch.object(lower, "PASSES", others):
        return model, lower_program(model.program, model.device)


def rotating_in_float32(graph):
    """Round each rotation once, as `rotate_and_store` does, but write and quantize as before."""
    for node in calls(graph, aten.add.Tensor):
        if (rotation := _rotated(node)) is not None:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.call_function(rotated, rotation))
    graph.recompile()
    return graph


@pytest.mark.slow_cases("mxint8-qwen3")
@pytest.mark.parametrize(
    ("text", "family"), [*OF_CODES.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]
)
def test_a_cache_of_codes(text, family):
    model, lowered = over_codes(text, family)
    want = step(model, rotating_in_float32(copy_sharing_tensors(lowered)), 1)
    for passes in ([fuse_rope], [everywhere(use_decoding_attention), fuse_rope]):
        graph = copy_sharing_tensors(lowered)
        for graph_pass in passes:
            graph_pass(graph)
        graph.graph.lint()
        assert len(calls(graph, rotate_quantize_and_store)) == 2
        assert not calls(graph, aten.index_copy_.default) and not calls(graph, quantize_mx)
        assert torch.equal(step(model, graph, 1), want)


@pytest.mark.parametrize("reader", ["the cache", "the written scales", "other slots", "other modes"])
def test_skipped_caches_of_codes(reader):
    graph = copy_sharing_tensors(over_codes("mxfp8", "llama")[1])
    codes, scales = calls(graph, aten.index_copy_.default)[:2]
    with graph.graph.inserting_after(scales):
        if reader == "the cache":
            graph.graph.call_function(aten.bitwise_not_.default, (codes.args[0],))
        elif reader == "the written scales":
            graph.graph.call_function(aten.bitwise_not_.default, (scales,))
    if reader == "other slots":
        with graph.graph.inserting_before(scales):
            scales.update_arg(2, graph.graph.call_function(aten.neg.default, (scales.args[2],)))
    elif reader == "other modes":
        calls(graph, quantize_mx)[0].update_arg(4, "rceil")
    assert len(calls(fuse_rope(graph), rotate_quantize_and_store)) == 1  # of the other layer
