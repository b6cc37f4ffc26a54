"""Recurrent layers: their states are tensors of the cache."""

import functools
import importlib

import pytest
import torch

from pt2mx import LanguageModel, MXError, MXQuantizer
from pt2mx.pt2e.language import runtime
from pt2mx.pt2e.language.decoder import export_decoder
from pt2mx.pt2e.language.recurrence import chunk_scan, gated_delta_rule, griffin_recurrence, selective_scan
from tests.compare import sqnr
from tests.language_models import check_packages, padded, quantized_decoder, tiny_decoder, with_rounded_weights

#: families with recurrent layers
DEFAULT = ("mamba", "lfm2")
SLOW = ("mamba2", "falcon_h1", "qwen3_next", "nemotron_h", "jamba", "recurrent_gemma")
EACH = [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
QUANTIZER = MXQuantizer.from_recipe("mxfp4_weight_only")


class Cache:
    """A cache with the state of one layer."""

    def __init__(self, state):
        self.latest = self
        self.recurrent_states = [state]


def original(module, name):
    return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)


def in_parts(call, state, sequences, dim):
    """Call a recurrence for the first 7 tokens, then for the others."""
    first, state = call(state, *(one.narrow(dim, 0, 7) for one in sequences))
    second, state = call(state, *(one.narrow(dim, 7, one.shape[dim] - 7) for one in sequences))
    return torch.cat([first, second], dim), state


def equal(result, expected):
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(result, expected, strict=True))


def test_the_recurrence_of_mamba():
    x, dt, z = torch.randn(3, 2, 6, 20)
    b, c = torch.randn(2, 2, 4, 20)
    fixed = {"A": -torch.rand(6, 4), "D": torch.randn(6), "delta_bias": torch.randn(6), "delta_softplus": True}

    def call(state, x, dt, b, c, z):
        return selective_scan(Cache(state), x, dt, B=b, C=c, z=z, **fixed)

    function = original("mamba", "mamba_selective_scan")
    expected = function(x, dt, B=b, C=c, z=z, return_last_state=True, **fixed)
    assert equal(in_parts(call, torch.zeros(2, 6, 4), (x, dt, b, c, z), 2), expected)


def test_the_recurrence_of_mamba_2():
    x, dt = torch.randn(2, 20, 4, 6), torch.randn(2, 20, 4)
    b, c = torch.randn(2, 2, 20, 2, 5)
    fixed = {"D": torch.randn(4), "dt_bias": torch.randn(4), "dt_softplus": True, "dt_limit": (0.1, 1.0)}
    a, state = -torch.rand(4), torch.randn(2, 4, 6, 5)

    def call(state, x, dt, b, c):
        return chunk_scan(None, x, dt, a, b, c, chunk_size=8, initial_states=state, **fixed)

    function = original("mamba2", "mamba2_chunk_scan")
    expected = function(x, dt, a, b, c, chunk_size=8, initial_states=state, return_final_states=True, **fixed)
    assert equal(in_parts(call, state, (x, dt, b, c), 1), expected)


def test_the_gated_delta_rule():
    q, k, v = torch.randn(3, 2, 20, 4, 6)
    g, beta = -torch.rand(2, 20, 4), torch.rand(2, 20, 4)
    state, options = torch.randn(2, 4, 6, 6), {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def call(state, q, k, v, g, beta):
        return gated_delta_rule(None, q, k, v, g=g, beta=beta, initial_state=state, **options)

    function = original("qwen3_next", "torch_chunk_gated_delta_rule")
    expected = function(q, k, v, g=g, beta=beta, initial_state=state, chunk_size=8, **options)
    assert equal(in_parts(call, state, (q, k, v, g, beta), 1), expected)


def test_the_recurrence_of_recurrent_gemma():
    """It begins anew where a row of a batch has its first token."""
    x, gate = torch.randn(2, 20, 6), torch.rand(2, 20, 6)
    reset = torch.tensor([[0], [9]]) == torch.arange(20)

    class KeepsState(Cache):
        def update_recurrent_state(self, state):
            self.recurrent_states = [state]

    def call(state, x, gate, reset):
        cache = KeepsState(state)
        return griffin_recurrence(cache, None, x, gate, reset[..., None])[0], cache.recurrent_states[0]

    function, state = original("recurrent_gemma", "RecurrentGemmaRglru")._rnn_scan, torch.randn(2, 6)
    expected = function(None, x, gate, reset[..., None], state)
    assert equal(in_parts(call, state, (x, gate, reset), 1), expected)


@functools.cache
def quantized(family):
    return quantized_decoder(family, QUANTIZER)


@pytest.mark.slow_cases("lfm2")
@pytest.mark.parametrize("family", EACH)
def test_generate_gives_the_tokens_of_transformers(family, tmp_path):
    """Prompts have different lengths. A folder holds all of the model."""
    model, eager = quantized(family), with_rounded_weights(family)
    ids, mask = padded()
    options = {"attention_mask": mask, "max_new_tokens": 33, "do_sample": False, "eos_token_id": None}
    tokens = model.generate(ids, **options)
    assert torch.equal(tokens, eager.generate(ids, **options)) and tokens[:, 12:].unique().numel() > 12
    options["max_new_tokens"] = 8
    beams = {"num_beams": 3, "use_cache": family != "recurrent_gemma"}  # whose states transformers does not reorder
    assert torch.equal(model.generate(ids, num_beams=3, **options), eager.generate(ids, **beams, **options))
    model.save_pretrained(tmp_path)
    loaded = LanguageModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(ids, **options), tokens[:, :20])


@torch.no_grad()
@pytest.mark.parametrize("family", EACH)
@pytest.mark.compiled_cases("lfm2")
def test_a_long_prompt_in_chunks_gives_the_same(family, monkeypatch):
    model, (ids, mask) = quantized(family), padded(length=40)
    expected = model(ids, attention_mask=mask)
    monkeypatch.setitem(runtime._CHUNK, "cpu", 13)
    result = model(ids, attention_mask=mask)
    states = [cache.past_key_values.inputs() for cache in (result, expected)]
    assert sqnr(result.logits, expected.logits) > 100  # attention adds in another order
    for name in ("conv_states", "recurrent_states"):
        assert equal(*(one.get(name, []) for one in states))


@pytest.mark.compiled
@torch.no_grad()
def test_padding_changes_nothing_in_recurrent_gemma():
    """In transformers padding enters the convolutions. Biases and tokens of the padding are not zero."""
    model = tiny_decoder("recurrent_gemma", num_hidden_layers=5, block_types=["recurrent", "recurrent", "attention"])
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) / 10)
    padded_model = LanguageModel(export_decoder(model), model.config, model.generation_config)
    ids, mask = padded()
    logits = padded_model(ids.where(mask.bool(), 7), attention_mask=mask).logits
    for row, padding in enumerate((mask == 0).sum(1).tolist()):
        alone = model(ids[row : row + 1, padding:], use_cache=False).logits[0]
        assert torch.allclose(logits[row, padding:], alone, atol=1e-5)


@pytest.mark.compiled
def test_states_cannot_drop_tokens():
    model = quantized("mamba")
    with torch.no_grad():
        cache = model(torch.zeros(1, 3, dtype=torch.long)).past_key_values
    with pytest.raises(MXError, match="cannot drop tokens"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0 and not any(tensor.any() for tensor in cache.layers[0].tensors)


@pytest.mark.compiled
@pytest.mark.parametrize("family", ["mamba", "falcon_h1"])
def test_compiled(family, compiler):
    model, (ids, mask) = quantized_decoder(family, QUANTIZER), padded()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    shorter = {**options, "attention_mask": mask[:, 1:]}
    expected = model.generate(ids, **options), model.generate(ids[:, 1:], **shorter)
    model.compile()
    assert torch.equal(model.generate(ids, **options), expected[0])
    assert torch.equal(model.generate(ids[:, 1:], **shorter), expected[1])


@pytest.mark.compiled
def test_packages(tmp_path, compiler):
    ids, mask = padded()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    check_packages(quantized("mamba"), tmp_path, ids, attention_mask=mask, **options)
