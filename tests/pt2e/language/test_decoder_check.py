import math
from unittest import mock

import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.language import compression, decoder, decoder_check, recurrence
from pt2mx.pt2e.language.cache import CacheInProgram
from pt2mx.pt2e.language.decoder import export_decoder
from pt2mx.pt2e.language.decoder_check import AGREEMENT, error_of, windows_of
from pt2mx.pt2e.language.layers import layers_of
from tests.language_models import tiny_decoder, transformers


@pytest.mark.slow_except("8-float32")
@pytest.mark.parametrize(("window", "dtype"), [(8, "float32"), (8, "bfloat16"), (256, "float32"), (256, "bfloat16")])
def test_attention_that_needs_a_cache_of_its_own_length_is_refused(window, dtype, monkeypatch):
    """GPT-Neo's own attention counts its window from the end of the cache."""
    monkeypatch.delitem(decoder.FUNCTIONS, "GPTNeoSelfAttention._attn")
    with pytest.raises(MXError, match="gives other logits than with its own"):
        export_decoder(tiny_decoder("gpt_neo", window_size=window, dtype=dtype))


@pytest.mark.compiled
def test_experts_that_rounding_chooses_are_no_error():
    """In bfloat16 transformers itself chooses other experts for some tokens, if it reads them in another order."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "num_local_experts": 16, "initializer_range": 0.1}
    torch.manual_seed(0)
    export_decoder(transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**sizes)).bfloat16().eval())


@pytest.mark.compiled
def test_logits_that_are_zero_or_no_numbers():
    model = tiny_decoder("llama", tie_word_embeddings=False)
    model.lm_head.weight.data.zero_()
    program, layers = export_decoder(model), layers_of(model)
    assert error_of(model, program, layers, None) == 0
    with mock.patch.object(decoder_check, "_errors", side_effect=[[0.1], [math.nan]]):
        assert math.isnan(error_of(model, program, layers, None))


@pytest.mark.slow_except("199")
@pytest.mark.parametrize("window", [199, 201, 256, None])
def test_another_window_than_that_of_the_model_is_an_error(window):
    """No text of the check is as long as the window: the values at its edge are large."""
    model = tiny_decoder("mistral", sliding_window=200, max_position_embeddings=4096)
    program = export_decoder(tiny_decoder("mistral", sliding_window=window, max_position_embeddings=4096))
    assert error_of(model, program, layers_of(model), None) > AGREEMENT


@pytest.mark.slow
def test_chunks_of_another_length_are_an_error():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "head_dim": 16,
        "vocab_size": 300,
    }

    def model(chunk):
        torch.manual_seed(0)
        config = transformers.Llama4TextConfig(**sizes, attention_chunk_size=chunk, pad_token_id=0)
        return transformers.Llama4ForCausalLM(config).eval()

    right, wrong = model(100), model(120)
    assert error_of(right, export_decoder(right), layers_of(right), None) < 1e-5
    assert error_of(right, export_decoder(wrong), layers_of(right), None) > AGREEMENT


@pytest.mark.compiled
def test_a_program_whose_cache_has_a_longest_length_is_refused():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**sizes, vocab_size=300, keep_window_size=16)).eval()
    with pytest.raises(MXError, match=r"^DogeForCausalLM cannot be exported with its cache: [^\n]*<= 16"):
        export_decoder(model)


@pytest.mark.compiled
def test_padding_that_changes_a_text_is_an_error(monkeypatch):
    """Without the zeros of pt2mx, padding enters the convolutions of RecurrentGemma."""

    def unmasked(own, *args, **kwargs):
        mask, own.mask = own.mask, torch.ones_like(own.mask)
        try:
            return recurrence.griffin_block(own, *args, **kwargs)
        finally:
            own.mask = mask

    monkeypatch.setitem(decoder.FUNCTIONS, "RecurrentGemmaRecurrentBlock.forward", unmasked)
    with pytest.raises(MXError, match="gives other logits than with its own"):
        export_decoder(tiny_decoder("recurrent_gemma"))


@pytest.mark.slow
def test_windows_that_count_padding_are_an_error(monkeypatch):
    """As transformers' windows of compressed tokens do."""

    def unmasked(own, *args, **kwargs):
        hidden = CacheInProgram(own.layers, torch.ones_like(own.mask), None)
        return compression.compressed_keys(hidden, *args, **kwargs)

    monkeypatch.setitem(decoder.FUNCTIONS, "DeepseekV4HCACompressor.forward", unmasked)
    with pytest.raises(MXError, match="gives other logits than with its own"):
        export_decoder(tiny_decoder("deepseek_v4"))


def test_windows_of_configurations():
    assert windows_of(transformers.MistralConfig(sliding_window=4096)) == [4096]
    assert windows_of(transformers.LlamaConfig()) == []
    assert windows_of(transformers.Qwen2Config(max_window_layers=28)) == []  # a number of layers
    assert windows_of(transformers.GPTNeoConfig(window_size=256)) == [256]
    assert 8192 in windows_of(transformers.Llama4TextConfig(attention_chunk_size=8192))
    assert 128 in windows_of(transformers.ModernBertDecoderConfig(local_attention=128))
    # no text of such a model is longer than its window
    assert windows_of(transformers.MistralConfig(sliding_window=4096, max_position_embeddings=4096)) == []
    assert windows_of(transformers.MistralConfig(sliding_window=2**20, max_position_embeddings=2**24)) == []
