"""quantize_llm_ on small Llama and Qwen2 models with random weights."""

import copy
import io
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt2mx import MXConfig, MXError, MXTensor, QAttentionConfig, QLinearConfig, quantize_llm_
from pt2mx.extras import import_extra
from pt2mx.pt2e.language.cache import CACHE, cache_in
from pt2mx.torchmx import MXInferenceLinear
from pt2mx.torchmx.layers.mx_attention import mx_attention, register_attention

transformers = import_extra("transformers", "hf")

FP8, FP6, FP4 = MXConfig("float8_e4m3"), MXConfig("float6_e2m3", 16), MXConfig("float4_e2m1")
PROJECTION, MLP = QLinearConfig(FP6, FP8), QLinearConfig(FP4, FP8)
PLAIN = QAttentionConfig(PROJECTION)
FULL = QAttentionConfig(PROJECTION, query_config=FP8, key_config=FP8, value_config=FP6, attention_weights_config=FP8)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make(kind: str, **fields) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **fields)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(2, 17, dtype=torch.int64)
    mask[0, :5] = 0
    return {"input_ids": torch.randint(97, (2, 17)), "attention_mask": mask}


KINDS = pytest.mark.parametrize("kind", ["Llama", "Qwen2"])


@KINDS
def test_in_high_precision_it_is_the_attention_of_the_model(kind):
    model = make(kind)
    model.set_attn_implementation("eager")
    expected = model(**inputs(), output_attentions=True)
    register_attention()
    model.set_attn_implementation("pt2mx")
    got = model(**inputs(), output_attentions=True)
    assert torch.equal(got.logits, expected.logits)
    assert all(torch.equal(a, b) for a, b in zip(got.attentions, expected.attentions, strict=True))


def test_sliding_windows_are_in_the_mask():
    model = make("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    everything = make("Qwen2")(**inputs()).logits
    expected = model(**inputs()).logits
    assert not torch.allclose(everything[1], expected[1])
    register_attention()
    model.set_attn_implementation("pt2mx")
    torch.testing.assert_close(model(**inputs()).logits[1], expected[1])


def test_the_matmuls_are_those_of_mx_tensors():
    module = nn.Module()
    module.qconfig = FULL
    query, key, value = torch.randn(2, 4, 5, 64), torch.randn(2, 2, 37, 64), torch.randn(2, 2, 37, 64)
    mask = torch.zeros(2, 1, 5, 37).masked_fill(torch.rand(2, 1, 5, 37) < 0.3, torch.finfo(torch.float32).min)
    out, weights = mx_attention(module.eval(), query, key, value, mask, scaling=0.2)

    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = MXTensor.to_mx(query, "fp8_e4m3") @ MXTensor.to_mx(key, "fp8_e4m3").transpose(2, 3) * 0.2 + mask
    expected = MXTensor.to_mx(scores.softmax(-1), "fp8_e4m3")
    assert torch.equal(weights, expected.to_dtype())
    value = MXTensor.to_mx(value, "fp6_e2m3", 16, axis=2)
    assert torch.equal(out, torch.matmul(expected, value).transpose(1, 2))


@pytest.mark.diagonal
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layer_has_its_format(kind, dtype):
    model, float_model = make(kind).to(dtype), make(kind).to(dtype)
    quantize_llm_(model, qattention_config=FULL, qmlp_config=MLP)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 2 * 7 + 1
    for name, linear in linears.items():
        assert type(linear) is MXInferenceLinear
        assert linear.qconfig is (PROJECTION if "self_attn" in name else MLP)
        weight = float_model.get_submodule(name).weight
        assert torch.equal(linear.weight.to_dtype(), MXTensor.to_mx(weight, linear.weight.spec).to_dtype())
    logits, expected = model(**inputs()).logits, float_model(**inputs()).logits
    assert logits.dtype == dtype
    seen = inputs()["attention_mask"].bool()
    assert F.cosine_similarity(logits[seen].float(), expected[seen].float()).mean() > 0.97


@KINDS
def test_without_qkv_formats_the_attention_function_stays(kind):
    model, float_model = make(kind), make(kind)
    quantize_llm_(model, PLAIN, MLP)
    assert model.config._attn_implementation == float_model.config._attn_implementation == "sdpa"
    by_hand = float_model
    for name, m in list(by_hand.named_modules()):
        if type(m) is nn.Linear:
            by_hand.set_submodule(name, MXInferenceLinear.from_float(m, PROJECTION if "self_attn" in name else MLP))
    assert torch.equal(model(**inputs()).logits, by_hand(**inputs()).logits)
    quantized_attention = make(kind)
    quantize_llm_(quantized_attention, FULL, MLP)
    assert not torch.allclose(quantized_attention(**inputs()).logits, model(**inputs()).logits)


@KINDS
def test_generate(kind):
    model = make(kind)
    value = MXConfig("float6_e2m3", 1)  # blocks of one value each, so that a cache changes nothing
    quantize_llm_(model, QAttentionConfig(PROJECTION, FP8, FP8, value, FP8), MLP)
    tokens = model.generate(**inputs(), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 23) and torch.equal(tokens[:, :17], inputs()["input_ids"])
    mask = F.pad(inputs()["attention_mask"], (0, 6), value=1)
    start = model(tokens[:, :20], attention_mask=mask[:, :20], use_cache=True)
    assert cache_in(start).layers[0].keys.shape == (2, 2, 20, 16)
    last = model(tokens[:, 20:22], attention_mask=mask[:, :22], **{CACHE: cache_in(start)}).logits
    expected = model(tokens[:, :22], attention_mask=mask[:, :22]).logits
    torch.testing.assert_close(last, expected[:, 20:], rtol=0, atol=0.02 * expected.abs().max().item())
    assert torch.equal(last[:, -1].argmax(-1), tokens[:, 22])


def test_a_tied_head_gets_its_own_weight():
    model = make("Qwen2", tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.clone()
    quantize_llm_(model, FULL, MLP)
    assert isinstance(model.lm_head.weight, MXTensor) and not model.config.tie_word_embeddings
    model.tie_weights()
    assert isinstance(model.lm_head.weight, MXTensor) and torch.equal(model.model.embed_tokens.weight, embedding)


@KINDS
def test_persistence(kind):
    model = make(kind)
    quantize_llm_(model, FULL, MLP)
    expected = model(**inputs()).logits
    assert torch.equal(copy.deepcopy(model)(**inputs()).logits, expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.manual_seed(2)
    other = type(model)(make(kind).config).eval()
    quantize_llm_(other, FULL, MLP)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert torch.equal(other(**inputs()).logits, expected)


@pytest.mark.compiled
@KINDS
def test_compile(kind, compiler):
    model = make(kind)
    quantize_llm_(model, FULL, MLP)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**inputs()).logits, model(**inputs()).logits)


def test_all_or_nothing():
    model = make("Llama")
    model.lm_head.double()
    before = list(model.modules())
    with pytest.raises(MXError, match=r"lm_head: cannot quantize a tensor of dtype torch\.float64"):
        quantize_llm_(model, FULL, MLP)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    assert model.config._attn_implementation == "sdpa"


def test_errors(monkeypatch):
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=10))
    with pytest.raises(MXError, match=r"GPT2LMHeadModel is no Llama or Qwen2 of transformers.*quantize_linear_ takes"):
        quantize_llm_(other, FULL, MLP)
    with pytest.raises(MXError, match="qattention_config must be a QAttentionConfig"):
        quantize_llm_(other, PROJECTION, MLP)
    with pytest.raises(MXError, match="qmlp_config must be a QLinearConfig"):
        quantize_llm_(other, FULL, FULL)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MXError, match=r"transformers is not installed: pip install 'pt2mx\[hf\]'"):
        quantize_llm_(nn.Linear(4, 4), FULL, MLP)
