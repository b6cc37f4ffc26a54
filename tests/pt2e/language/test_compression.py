"""Layers that compress windows of their tokens: the entries are tensors of the cache."""

import pytest
import torch

from pt2mx import LanguageModel, MXQuantizer, quantize_language_model
from pt2mx.pt2e.language import runtime
from pt2mx.pt2e.language.cache import CacheInProgram, CacheLayer
from pt2mx.pt2e.language.compression import Windows, _bias_of_highest
from pt2mx.pt2e.language.decoder_check import distance
from tests.language_models import (
    check_another_process,
    check_compiled,
    check_packages,
    exported_decoder,
    padded,
    quantized_decoder,
    tiny_decoder,
    with_rounded_weights,
)

FAMILY = "deepseek_v4"
QUANTIZER = MXQuantizer.from_recipe("mxfp4_weight_only")
OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


def alone(eager, ids, mask, **options):
    """The new tokens of each prompt without its padding, which enters the windows of transformers."""
    prompts = (ids[row : row + 1, int((mask[row] == 0).sum()) :] for row in range(len(ids)))
    return torch.cat([eager.generate(prompt, **OPTIONS, **options)[:, prompt.shape[1] :] for prompt in prompts])


def test_windows_count_from_the_first_token_of_a_text():
    """5 tokens after 6, without padding, with 3 of padding, and all of them padding; windows of 4 tokens."""
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[1, :3] = mask[2, :14] = 0
    windows = Windows.of(CacheInProgram([CacheLayer({}, torch.tensor([6]))], mask, None), 4, 5)
    assert windows.columns.tolist() == [[1, 5, 9], [0, 4, 8], [3, 7, 11]]  # 5 and more: not among the tokens
    assert windows.positions.tolist() == [[7, 11, 15], [3, 7, 11], [-5, -1, 3]]
    assert windows.slots.tolist() == [[1, 15, 15], [0, 1, 15], [15, 15, 15]]
    tokens = torch.arange(2 * 8).reshape(1, 8, 2).expand(3, 8, 2)  # 3 before the 5
    assert windows.of_tokens(tokens, 2)[0, 0, :, 0].tolist() == [2, 4, 6, 8]
    assert windows.of_tokens(tokens, 2)[1, 1, :, 1].tolist() == [9, 11, 13, 15]


def test_an_entry_of_two_windows_takes_one_vector_of_each():
    windows = Windows(2, torch.tensor([[1]]), torch.tensor([[6]]), torch.tensor([[3]]))
    tokens = torch.tensor([[[i, 10 * i] for i in range(6)]])
    assert windows.of_tokens(tokens, 1).tolist() == [[[[1], [2], [30], [40]]]]


def test_the_highest_scores():
    scores, hidden = torch.tensor([[3.0, 1.0, 2.0], [1.0, -torch.inf, -torch.inf]]), -torch.inf
    assert _bias_of_highest(scores, 2)[0].tolist() == [0, hidden, 0] and _bias_of_highest(scores, 2)[1, 0] == 0
    assert _bias_of_highest(scores, 5)[0].tolist() == [0, 0, 0]  # fewer scores than that


@pytest.mark.slow
def test_generate_gives_the_tokens_of_transformers():
    """The text is longer than the window of attention, and has more entries than the indexer chooses."""
    model, program = exported_decoder(FAMILY)
    ids, mask = padded()
    serves = LanguageModel(program, model.config, model.generation_config)
    for own, eager in ((serves, model), (quantized_decoder(FAMILY, QUANTIZER), with_rounded_weights(FAMILY))):
        for options in ({}, {"num_beams": 3}):
            tokens = own.generate(ids, attention_mask=mask, **OPTIONS, **options)[:, ids.shape[1] :]
            expected = alone(eager, ids, mask, use_cache=False, **options)  # 5.20 does not reorder the entries
            assert torch.equal(tokens, expected) and tokens.unique().numel() > 30


@pytest.mark.slow
@torch.no_grad()
def test_a_prompt_in_chunks_and_single_tokens(monkeypatch):
    """Chunks and single tokens end within windows."""
    _, program = exported_decoder(FAMILY)
    model, (ids, mask) = LanguageModel(program, tiny_decoder(FAMILY).config), padded(length=40)
    expected = model(ids, attention_mask=mask)
    monkeypatch.setitem(runtime._CHUNK, "cpu", 7)
    cache, logits = None, []
    for first, last in ((0, 23), (23, 24), (24, 25), (25, 40)):
        result = model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
        cache = result.past_key_values
        logits.append(result.logits)
    for row, padding in enumerate((mask == 0).sum(1).tolist()):
        both = (one[row, padding:] for one in (torch.cat(logits, 1), expected.logits))
        assert torch.allclose(*both, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_a_cache_that_grows():
    """Slots that were the last ones before hold entries later."""
    _, program = exported_decoder(FAMILY)
    model = LanguageModel(program, tiny_decoder(FAMILY).config)
    ids = torch.randint(256, (1, 600), generator=torch.Generator().manual_seed(2))
    cache, logits = None, []
    for part in ids.split(200, 1):
        result = model(part, past_key_values=cache)
        cache = result.past_key_values
        logits.append(result.logits)
    assert torch.allclose(torch.cat(logits, 1), model(ids).logits, atol=1e-4)
    assert cache.slots == 768 and cache.layers[0].stored["compressed_keys"].shape[2] == 768


@pytest.mark.slow
@torch.no_grad()
def test_a_quantized_cache_holds_codes_of_keys():
    """Entries stay tensors."""
    (ids, mask), quantizer = padded(), MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache("mxint8")
    own, exact = (quantized_decoder(FAMILY, one)(ids, attention_mask=mask) for one in (quantizer, QUANTIZER))
    stored = own.past_key_values.inputs()
    assert all(codes.dtype == scale.dtype == torch.uint8 for codes, scale in (*stored["keys"], *stored["values"]))
    assert all(one.dtype == torch.float32 for one in (*stored["compressed_keys"], *stored["index_keys"]))
    assert 0 < distance(own.logits[0], exact.logits[0]) < 0.1


@pytest.mark.slow
def test_a_folder_serves_another_process(tmp_path):
    ids, mask = padded()
    check_another_process(quantized_decoder(FAMILY, QUANTIZER), tmp_path, ids, attention_mask=mask, **OPTIONS)


def of_one_layer():
    """A quantized model whose layer has an indexer."""
    layer = {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"]}
    return quantize_language_model(tiny_decoder(FAMILY, hc_sinkhorn_iters=1, **layer), QUANTIZER)


@pytest.mark.compiled
def test_compiled(compiler):
    ids, mask = padded()
    check_compiled(of_one_layer(), ids, attention_mask=mask, **OPTIONS)


@pytest.mark.slow
@pytest.mark.compiled
def test_packages(tmp_path, compiler):
    ids, mask = padded()
    check_packages(of_one_layer(), tmp_path, ids, attention_mask=mask, **OPTIONS)
