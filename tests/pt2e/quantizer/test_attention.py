import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pt2mx
from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.annotate import REMARK
from tests.flow import convert
from tests.models import module_of

CONFIGS = {
    where: pt2mx.get_default_mx_quantization_config("mxfp8", "mxfp8", value_blocks=where)
    for where in ("head_dim", "key_length")
}


def q8(x, axis):
    return pt2mx.fake_quantize_mx(x, "mxfp8", axis=axis)


def probabilities(q, k):
    return (q8(q, -1) @ q8(k.transpose(-2, -1), -2) / 8).softmax(-1)


def by_hand(axis):
    return lambda q, k, v: q8(probabilities(q, k), -1) @ q8(v, axis)


def scores(q, k):
    return q @ k.transpose(-2, -1) / 8


def flat(x):
    return x.reshape(-1, *x.shape[-2:])


def dropped(q, k, v):
    return F.dropout(F.softmax(scores(q, k), -1, torch.float32).to(q.dtype), 0.1, False) @ v


def values_first(q, k, v):
    return (v.mT @ scores(q, k).softmax(-1).mT).mT


def largest(q, k, v):
    p, indices = scores(q, k).softmax(-1).topk(40, -1)
    return torch.zeros_like(p).scatter(-1, indices, p) @ v


def reordered(q, k, v):
    y = torch.einsum("bkhd,bhqk->bqhd", v.transpose(1, 2), scores(q, k).softmax(-1))
    return y.transpose(1, 2)


#: an attention of q (2, 3, 5, 64) and of k and v (2, 3, 40, 64), as models spell it
SPELLINGS = {
    "matmul": lambda q, k, v: scores(q, k).softmax(-1) @ v,
    "bmm": lambda q, k, v: torch.bmm(flat(scores(q, k).softmax(-1)), flat(v)).view(q.shape),
    "a cast and dropout": dropped,
    "a mask after it": lambda q, k, v: torch.where(k.new_zeros(40) == 0, scores(q, k).softmax(-1), 0.0) @ v,
    "a triangle after it": lambda q, k, v: scores(q, k).softmax(-1).tril(40) @ v,
    "the largest of them": largest,
    "the logarithm of it": lambda q, k, v: scores(q, k).log_softmax(-1).exp() @ v,
    "values first": values_first,
    "einsum": lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", scores(q, k).softmax(-1), v),
    "an einsum in another order": reordered,
    "a sink that is cut off": lambda q, k, v: torch.cat([scores(q, k), q[..., :1]], -1).softmax(-1)[..., :-1] @ v,
}


def converted_of(function, inputs, config):
    module = function if isinstance(function, nn.Module) else module_of(lambda self, *inputs: function(*inputs))
    return convert(module, inputs, pt2mx.MXQuantizer().set_global(config))


def qkv():
    return torch.randn(2, 3, 5, 64), torch.randn(2, 3, 40, 64), torch.randn(2, 3, 40, 64)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_values_are_known_by_the_softmax(spelling):
    inputs, along = qkv(), {"head_dim": -1, "key_length": -2}
    for where, axis in along.items():
        got = converted_of(SPELLINGS[spelling], inputs, CONFIGS[where])
        want = by_hand(axis)(*inputs)
        if spelling != "a sink that is cut off":
            assert torch.allclose(got(*inputs), want, atol=1e-6), where
        remarks = [o.notes for o in pt2mx.quantization_report(got).operators]
        assert (REMARK in remarks) == (where == "key_length")


def test_fused_attention():
    q, k, v = qkv()
    for where, axis in (("head_dim", -1), ("key_length", -2)):
        converted = converted_of(F.scaled_dot_product_attention, (q, k, v), CONFIGS[where])
        assert torch.equal(converted(q, k, v), F.scaled_dot_product_attention(q8(q, -1), q8(k, -1), q8(v, axis)))


def test_other_matmuls_have_blocks_along_the_reduced_dimension():
    q, k, v = qkv()
    # probabilities times a constant, which holds no tokens
    module = module_of(
        lambda self, q, k, v: scores(q, k).softmax(-1) @ self.weight, weight=nn.Parameter(torch.randn(40, 12))
    )
    got = converted_of(module, (q, k, v), CONFIGS["head_dim"])(q, k, v)
    assert torch.allclose(got, q8(probabilities(q, k), -1) @ q8(module.weight.detach(), -2), atol=1e-6)
    plain = converted_of(lambda q, k, v: scores(q, k).relu() @ v, (q, k, v), CONFIGS["head_dim"])
    want = q8((q8(q, -1) @ q8(k.transpose(-2, -1), -2) / 8).relu(), -1) @ q8(v, -2)
    assert torch.allclose(plain(q, k, v), want, atol=1e-4)


def test_a_recipe_says_where():
    quantizer = pt2mx.MXQuantizer().set_global(CONFIGS["key_length"])
    text = quantizer.to_recipe()
    assert "value_blocks: key_length" in text
    assert "value_blocks" not in pt2mx.MXQuantizer().set_global(CONFIGS["head_dim"]).to_recipe()
    with pytest.raises(MXError, match=r"value_blocks 'tokens'.*head_dim, key_length"):
        pt2mx.MXQuantizationConfig(activation="mxfp8", value_blocks="tokens")


def test_a_recipe_is_read_back(tmp_path):
    pt2mx.MXQuantizer().set_global(CONFIGS["key_length"]).to_recipe(tmp_path / "r.yaml")
    ((_, _, config),) = recipe.read(tmp_path / "r.yaml").settings
    assert config == CONFIGS["key_length"]


def decoder(attention, **options):
    transformers = import_extra("transformers", "hf")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, attn_implementation=attention, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prefill(self, input_ids):
    return self.model(input_ids=input_ids, use_cache=False).logits


def in_each_format(module, inputs):
    """Yield the exported float model, and the one converted to each format; they take keyword arguments."""
    graph = torch.export.export(module, (), inputs).module()
    for element in ("mxfp8", "mxfp4"):
        config = pt2mx.get_default_mx_quantization_config(element, element)
        prepared = pt2mx.prepare_pt2e(graph, pt2mx.MXQuantizer().set_global(config))
        prepared(**inputs)
        yield pt2mx.convert_pt2e(prepared)
    yield graph


pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.slow_except("sdpa")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_later_token_changes_nothing_before_it(attention):
    ids = torch.randint(64, (1, 40))
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % 64
    for model in in_each_format(module_of(prefill, model=decoder(attention)), {"input_ids": ids}):
        first, second = model(input_ids=ids), model(input_ids=other)
        assert torch.equal(first[:, :-1], second[:, :-1])
        assert not torch.equal(first[:, -1], second[:, -1])


@pytest.mark.slow_except("sdpa")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_old_content_of_a_cache_changes_nothing(attention):
    model = decoder(attention)
    model.generation_config.cache_implementation = "static"
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=48)
    first, second = torch.randint(64, (2, 1, 20))
    positions = torch.arange(20)
    for model in in_each_format(module, {"input_ids": first, "cache_position": positions}):
        caches = [buffer for buffer in model.buffers() if buffer.shape == (1, 1, 48, 32)]
        assert caches and not any(map(torch.any, caches)), "convert resets the writes of calibration"
        fresh = model(input_ids=second, cache_position=positions)
        for cache in caches:
            assert cache.any()
            cache[..., 10:, :] = 1000 * torch.randn_like(cache[..., 10:, :])
        assert torch.equal(model(input_ids=second, cache_position=positions), fresh)


@pytest.mark.slow_except("eager")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_nothing(attention):
    transformers = import_extra("transformers", "hf")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
        attn_implementation=attention,
    )  # fmt: skip
    bert = transformers.BertModel(config, add_pooling_layer=False).eval()
    bert.register_forward_hook(lambda module, inputs, output: output.last_hidden_state)
    ids, mask = torch.randint(64, (2, 40)), torch.ones(2, 40, dtype=torch.int64)
    mask[0, 21:] = 0
    other = ids.clone()
    other[0, 21:] = torch.randint(64, (19,))
    for model in in_each_format(bert, {"input_ids": ids, "attention_mask": mask}):
        outputs = [model(input_ids=i, attention_mask=mask) for i in (ids, other)]
        assert torch.equal(outputs[0][0, :21], outputs[1][0, :21]) and torch.equal(outputs[0][1], outputs[1][1])
        assert not torch.equal(outputs[0][0, 21:], outputs[1][0, 21:])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_and_alone(attention):
    """One layer of attention, whose sums are short enough to be equal in both."""

    class Attention(nn.Module):
        def forward(self, q, k, v, mask):
            if attention == "sdpa":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return torch.where(mask, scores(q, k), -torch.inf).softmax(-1) @ v

    q, k, v = (torch.randn(1, 2, n, 32) for n in (3, 32, 32))
    padded = [torch.cat([x, 100 * torch.randn(1, 2, 32, 32)], 2) for x in (k, v)]
    mask = torch.arange(64).expand(3, 64) < 32
    shapes = (None, *({2: torch.export.Dim("keys", min=2)} for _ in "kv"), {1: torch.export.Dim("keys", min=2)})
    exported = torch.export.export(Attention(), (q, *padded, mask), dynamic_shapes=shapes)
    prepared = pt2mx.prepare_pt2e(exported.module(), pt2mx.MXQuantizer().set_global(CONFIGS["head_dim"]))
    converted = pt2mx.convert_pt2e(prepared)
    float_error, error = (
        (model(q, k, v, mask[:, :32]) - model(q, *padded, mask)).abs().max() for model in (exported.module(), converted)
    )
    assert error <= max(float_error, 1e-6)
