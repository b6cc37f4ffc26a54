"""Layers that keep no keys and values of their own, or more than these."""

import pytest
import torch

from pt2mx import LanguageModel, MXError, MXQuantizer, quantize_language_model
from pt2mx.pt2e.language.decoder import CachedDecoder, inputs
from pt2mx.pt2e.language.layers import layers_of
from tests.language_models import (
    FAMILIES,
    check_another_process,
    check_compiled,
    exported_decoder,
    padded,
    quantized_decoder,
    round_weights,
    tiny_decoder,
    transformers,
    with_rounded_weights,
)

PAIR, ENTRIES = ["keys", "values"], ["compressed_keys", "conv_states", "keys"]
#: families whose last layers read the keys and values of earlier ones
SHARED = "gemma4", "gemma3n"
#: family -> what those of its layers keep that keep anything
KEPT = {
    "gemma4": [PAIR, PAIR],
    "gemma3n": [PAIR, PAIR],
    "deepseek_v4": [PAIR, sorted([*ENTRIES, "index_keys"]), ENTRIES],
}
QUANTIZER = MXQuantizer.from_recipe("mxfp4_weight_only")
#: options of `generate`
OPTIONS = {"max_new_tokens": 24, "eos_token_id": None}


@torch.no_grad()
@pytest.mark.parametrize("family", KEPT)
def test_prompts_and_single_tokens_without_an_export(family):
    """The second of two texts is padded; both are longer than the window. Parts end anywhere."""
    model = tiny_decoder(family)
    layers = layers_of(model)
    assert [sorted(layer) for layer in layers if layer] == KEPT[family]
    decoder, ids = CachedDecoder(model, layers), padded(2, 24)[0]
    call, logits = inputs(layers, model.device, ids), []
    call["attention_mask"][1, :3] = 0
    call["position_ids"] = (call["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for first, last in ((0, 2), (2, 13), (13, 14), (14, 15), (15, 24)):
        part = {name: call[name][:, first:last] for name in ("input_ids", "position_ids")}
        kept = torch.arange(last - first)
        logits.append(decoder(**{**call, **part, "start": torch.tensor([first]), "logits_to_keep": kept}))
    for row, padding in enumerate((0, 3)):
        expected = model(ids[row : row + 1, padding:], use_cache=False).logits[0]
        assert torch.allclose(torch.cat(logits, 1)[row, padding:], expected, atol=5e-5)


def test_a_layer_that_also_keeps_the_keys_of_an_indexer():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV32Config(**sizes, vocab_size=300, intermediate_size=64, pad_token_id=0)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    with pytest.raises(MXError, match="layer 0 of DeepseekV32ForCausalLM keeps a DynamicIndexedLayer, not keys and"):
        layers_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARED)
def test_layers_that_share_keys_and_values(family):
    """Prompts of different lengths are longer than the window."""
    model, program = exported_decoder(family)
    (ids, mask), serves = padded(), LanguageModel(program, model.config, model.generation_config)
    for own, eager in ((serves, model), (quantized_decoder(family, QUANTIZER), with_rounded_weights(family))):
        for search in ({"num_beams": 3}, {}):
            calls = {"attention_mask": mask, "do_sample": False, **search, **OPTIONS}
            tokens = own.generate(ids, **calls)
            assert torch.equal(tokens, eager.generate(ids, **calls)) and tokens[:, 12:].unique().numel() > 30


@pytest.mark.slow
def test_the_text_of_a_checkpoint_with_towers():
    """As checkpoints of Gemma 4 E2B are."""
    kind, fields = FAMILIES["gemma4"]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}
    text = getattr(transformers, kind)(**fields, pad_token_id=257).to_dict()
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    torch.manual_seed(0)
    model, (ids, mask) = transformers.Gemma4ForConditionalGeneration(config).eval(), padded()
    with pytest.raises(MXError, match=r"a gemma4_vision, is not supported: .* give --part language_model"):
        quantize_language_model(model, QUANTIZER)
    quantized = quantize_language_model(model, QUANTIZER, part="language_model")
    calls = {"attention_mask": mask, "do_sample": False, **OPTIONS}
    assert torch.equal(quantized.generate(ids, **calls), round_weights(model).generate(ids, **calls))


@pytest.mark.slow
def test_a_folder_serves_another_process(tmp_path):
    ids, mask = padded()
    model = quantized_decoder("gemma4", QUANTIZER)
    check_another_process(model, tmp_path, ids, attention_mask=mask, do_sample=False, **OPTIONS)


@pytest.mark.slow
def test_a_text_of_shared_keys_goes_on_where_it_ended():
    _, program = exported_decoder("gemma4")
    model, ids = LanguageModel(program, tiny_decoder("gemma4").config), padded()[0]
    first = model(ids[:, :9])
    rest = model(ids[:, 9:], past_key_values=first.past_key_values)
    assert torch.allclose(torch.cat([first.logits, rest.logits], 1), model(ids).logits, atol=1e-5)
    assert [sorted(layer.stored) for layer in rest.past_key_values.layers] == [["keys", "values"]] * 2


@pytest.mark.compiled
def test_compiled(compiler):
    ids, mask = padded()
    check_compiled(quantized_decoder("gemma4", QUANTIZER), ids, attention_mask=mask, do_sample=False, **OPTIONS)
