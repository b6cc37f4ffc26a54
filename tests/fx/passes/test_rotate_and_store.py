"""`fuse_rope` on tiny decoders."""

import pytest
import torch

from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.decoding_attention import store_positions, use_decoding_attention
from pt2mx.fx.passes.rotate_and_store import fuse_rope
from pt2mx.ops.rope import rotate_and_store
from pt2mx.pt2e.language.runtime import _POSITIONS
from tests.fx.passes.test_decoding_attention import step
from tests.graph import calls
from tests.language_models import decoder_by_recipe

aten = torch.ops.aten
#: family -> layers whose rotation is fused, of two
FUSED = {"llama": 2, "qwen3": 2, "phi3": 0, "mistral": 2, "gemma2": 2, "gpt2": 0, "gptj": 0, "gpt_neox": 0}


@pytest.mark.parametrize("family", FUSED)
def test_decoders(family):
    model = decoder_by_recipe("mxfp4_weight_only", family, dtype="bfloat16")
    graph = use_decoding_attention(copy_sharing_tensors(model.decoder), everywhere=True)
    fuse_rope(graph)
    graph.graph.lint()
    assert len(calls(graph, rotate_and_store)) == FUSED[family]
    assert len(calls(graph, aten.index_copy_.default)) == 2 * (2 - FUSED[family])
    got, want = step(model, graph, 1), step(model, model.decoder, 1)
    assert (got - want).norm() <= 2**-6 * want.norm()
    for node in calls(graph, rotate_and_store):
        assert node.meta["val"].dtype == torch.bfloat16 and node.args[3].op == node.args[4].op == "placeholder"


@pytest.mark.parametrize("reader", ["the cache", "the written cache", "other slots"])
def test_skipped(reader):
    model = decoder_by_recipe("mxfp4_weight_only", "llama", dtype="bfloat16")
    graph = use_decoding_attention(copy_sharing_tensors(model.decoder), everywhere=True)
    write = calls(graph, aten.index_copy_.default)[0]
    with graph.graph.inserting_after(write):
        if reader == "the cache":
            graph.graph.call_function(aten.add_.Tensor, (write.args[0], 1))
        elif reader == "the written cache":
            graph.graph.call_function(aten.add_.Tensor, (write, 1))
    if reader == "other slots":
        with graph.graph.inserting_before(write):
            write.update_arg(2, graph.graph.call_function(aten.neg.default, (write.args[2],)))
    assert len(calls(fuse_rope(graph), rotate_and_store)) == 1  # of the other layer


def test_the_layers_share_slots_and_factors():
    model = decoder_by_recipe("mxfp4_weight_only", "llama", dtype="bfloat16")
    graph = fuse_rope(use_decoding_attention(copy_sharing_tensors(model.decoder), everywhere=True))
    want = step(model, graph, 1)
    assert len({node.args[5] for node in calls(graph, rotate_and_store)}) == 2
    store_positions(graph, _POSITIONS)
    graph.graph.lint()
    first, second = calls(graph, rotate_and_store)
    assert first.args[5:] == second.args[5:] and torch.equal(step(model, graph, 1), want)
