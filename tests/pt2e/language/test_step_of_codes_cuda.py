"""Steps of a bfloat16 decoder over a cache of codes on a GPU, where the operators of a decoder's step run."""

import pytest
import torch
from torch.utils import _pytree as pytree

from pt2mx import LanguageModel, MXQuantizer
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.ops.decoding import decoding_attention_mx
from pt2mx.ops.rope import RotateQuantizeAndStore, rotate_quantize_and_store
from tests.fx.passes.test_decoding_attention import step
from tests.graph import calls
from tests.language_models import padded, quantized_decoder

pytestmark = pytest.mark.cuda

SIZES = {"hidden_size": 256, "intermediate_size": 512, "dtype": "bfloat16"}  # heads of 64 values
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module", params=["mxfp8", "mxint8", "mxfp6", "mxfp4", "nvfp4"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache(request.param)
    quantized_decoder("llama", quantizer, **SIZES).save_pretrained(folder)
    return LanguageModel.from_pretrained(folder, "cuda")


def test_the_kernels_write_what_their_definition_writes(model):
    fused = model.runner.step_of(2)
    assert len(calls(fused, rotate_quantize_and_store)) == len(calls(fused, decoding_attention_mx)) == 2
    assert not calls(fused, torch.ops.aten.index_copy_.default)
    defined = copy_sharing_tensors(fused)
    for node in calls(defined, rotate_quantize_and_store):
        node.target = RotateQuantizeAndStore.function(RotateQuantizeAndStore.decompose)
    defined.recompile()
    caches = [model.new_cache(2, 8) for _ in range(2)]
    got, want = (step(model, graph, 1, cache) for graph, cache in zip((fused, defined), caches, strict=True))
    assert torch.equal(got, want) and got.isfinite().all()
    stored = [pytree.tree_leaves(cache.inputs()) for cache in caches]
    assert len(stored[0]) == 8 and all(map(torch.equal, *stored))


def test_tokens_of_a_graph(model, monkeypatch):
    torch._dynamo.reset()
    model.compile(mode="reduce-overhead")
    ids, mask = (tensor.cuda() for tensor in padded(3))
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "_covers", lambda *arguments: False)
        want = model.generate(ids, attention_mask=mask, **GREEDY)
    for _ in range(10):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), want)
    assert model._step.is_captured
