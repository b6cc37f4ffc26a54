"""`use_decoding_attention` and `store_positions` on tiny decoders, and on the calls that they skip."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import MXQuantizer, quantize_language_model, quantize_mx
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.decoding_attention import JOINED_SEQUENCES, store_positions, use_decoding_attention
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.decoding import decoding_attention, decoding_attention_mx, stored
from pt2mx.pt2e.language.runtime import _POSITIONS
from tests.every_device import everywhere
from tests.graph import calls
from tests.language_models import decoder_by_recipe, decoder_of_codes
from tests.models import module_of
from tests.vision_language_models import tiny_vision_language_model


def step(model, graph, seen, cache=None):
    """Run three steps of two sequences, the first `seen` tokens of one of them hidden; return the last logits."""
    cache, mask = cache or model.new_cache(2, 8), torch.ones(2, 8, dtype=torch.long, device=model.device)
    mask[1, :seen] = 0
    for start in range(3):
        logits = graph(
            input_ids=torch.tensor([[7], [200]], device=model.device) + start,
            position_ids=torch.full((2, 1), start, device=model.device),
            attention_mask=F.pad(mask, (0, cache.slots - 8)),
            start=torch.tensor([start], device=model.device),
            logits_to_keep=torch.tensor([0], device=model.device),
            **cache.inputs(),
        )
    return logits.float()


@pytest.mark.compiled
@pytest.mark.slow_except("llama")
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mistral")), "gpt2"]
)
def test_decoders(family):
    model = decoder_by_recipe("mxfp4_weight_only", family, dtype="bfloat16")
    graph = everywhere(use_decoding_attention)(copy_sharing_tensors(model.decoder))
    key_heads = 4 if family == "gpt2" else 2
    assert graph.attention_zeros.shape == (JOINED_SEQUENCES * key_heads,) and graph.attention_zeros.dtype == torch.int32
    assert len(calls(graph, decoding_attention)) == 2
    assert torch.equal(step(model, graph, 1), step(model, model.decoder, 1))
    got = step(model, store_positions(graph, _POSITIONS), 1)
    assert torch.equal(got, step(model, model.decoder, 1))
    assert len(calls(graph, stored)) == (1 if family == "gpt2" else 3)  # the mask; cosines and sines


@pytest.mark.compiled
@pytest.mark.slow_except("mxfp8")
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", pytest.param("mxfp6", marks=pytest.mark.slow)])
def test_a_cache_of_codes(text):
    model = decoder_of_codes(text, "llama")
    graph = everywhere(use_decoding_attention)(copy_sharing_tensors(model.decoder))
    graph.graph.lint()
    first, second = calls(graph, decoding_attention_mx)
    assert first.args[10] is second.args[10] and not calls(graph, attention_mx)
    assert graph.attention_zeros.shape == (JOINED_SEQUENCES * 2,) and not graph.attention_zeros.any()
    assert torch.equal(step(model, graph, 1), step(model, model.decoder, 1))


def test_scales_of_a_tensor_are_skipped():
    class Attention(torch.nn.Module):
        def forward(self, *operands):
            more = None, None, "e4m3_f32", *operands[5:]
            return attention_mx(*operands[:5], "fp4_e2m1", 16, 32, *more)

    query, x, t = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 5, 32), torch.ones(())
    scale, data = quantize_mx(x, "nvfp4", tensor_scale=t)
    graph = torch.export.export(Attention(), (query, data, scale, data, scale, t, t)).module()
    assert len(calls(everywhere(use_decoding_attention)(graph), attention_mx)) == 1


def test_stored_once():
    model = decoder_by_recipe("mxfp4_weight_only", "llama", dtype="bfloat16")
    graph = store_positions(copy_sharing_tensors(model.decoder), _POSITIONS)
    values = [node.args[0] for node in calls(graph, stored)]
    aten = torch.ops.aten
    assert [node.target for node in values] == [aten.__or__.Tensor, aten.mul.Tensor, aten.mul.Tensor]  # mask, RoPE
    assert all(len(node.users) == 1 for node in values)
    assert calls(store_positions(copy_sharing_tensors(model.decoder), ()), stored) == []


@pytest.mark.compiled
def test_positions_of_images():
    model = tiny_vision_language_model("qwen2_vl")
    decoder = quantize_language_model(model, MXQuantizer.from_recipe("mxfp4_weight_only")).decoder
    assert len(calls(store_positions(copy_sharing_tensors(decoder), _POSITIONS), stored)) == 3  # mask, cosines, sines


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, mask: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        lambda q, k, mask: F.scaled_dot_product_attention(q, k, k, mask.bfloat16()),
        lambda q, k, mask: F.scaled_dot_product_attention(q, k, k, mask, dropout_p=0.5),
        lambda q, k, mask: F.scaled_dot_product_attention(q.double(), k.double(), k.double(), mask),
        lambda q, k, mask: F.scaled_dot_product_attention(q, k[:1], k[:1], mask),
        lambda q, k, mask: F.scaled_dot_product_attention(q[:1], k, k, mask),
        lambda q, k, mask: F.scaled_dot_product_attention(q[:, :1], k, k, mask),
    ],
)
def test_skipped(call):
    q, k = torch.randn(2, 4, 1, 16).bfloat16(), torch.randn(2, 4, 8, 16).bfloat16()
    attention = module_of(lambda self, q, k, mask: call(q, k, mask))
    graph = torch.export.export(attention, (q, k, torch.ones(2, 1, 1, 8, dtype=torch.bool))).module()
    assert not calls(everywhere(use_decoding_attention)(graph), decoding_attention)


@pytest.mark.slow_except("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.compiled_cases("bfloat16")
def test_on_a_cpu(dtype):
    """The kernel of `decoding_attention` reads floats, that of `attention_mx` codes; there are no counters."""
    model = decoder_by_recipe("mxfp4_weight_only", "llama", dtype=dtype, head_dim=32)
    graph = use_decoding_attention(copy_sharing_tensors(model.decoder))
    assert [call.args[-1] for call in calls(graph, decoding_attention)] == [None, None]
    graph = use_decoding_attention(copy_sharing_tensors(decoder_of_codes("mxfp8", "llama").decoder))
    assert not calls(graph, decoding_attention_mx)


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "is_replaced"),
    [(4, 4, 64, True), (4, 4, 80, False), (32, 1, 32, True), (33, 1, 32, False)],
)
def test_heads_without_a_kernel_of_the_cpu(heads, key_heads, width, is_replaced):
    net = module_of(lambda self, q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True))
    graph = torch.export.export(net, (torch.randn(2, heads, 1, width), torch.randn(2, key_heads, 8, width))).module()
    assert len(calls(use_decoding_attention(graph), decoding_attention)) == is_replaced
