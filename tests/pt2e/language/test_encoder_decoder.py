"""Encoder-decoders: the encoder is a program of its own, and cross attention reads its results from the cache."""

import copy

import pytest
import torch

from pt2mx import LanguageModel, MXError, MXQuantizer, quantize_language_model
from pt2mx.pt2e.language.encoder_decoder import EncoderDecoder
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.language.quantize_encoder import FloatSource
from pt2mx.pt2e.language.source import SourceEncoder
from tests.encoder_decoders import (
    FAMILIES,
    quantized_encoder_decoder,
    rounded_encoder_decoder,
    sources,
    tiny_encoder_decoder,
    transformers,
)
from tests.language_models import check_compiled, check_packages

#: families that differ in the program: a bias of positions, audio
DEFAULT = ("t5", "whisper")
EACH = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
#: the settings of a multilingual Whisper
WHISPER = {
    "decoder_start_token_id": 256,
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 290, "<|de|>": 291},
    "task_to_id": {"transcribe": 292, "translate": 293},
    "no_timestamps_token_id": 295,
    "begin_suppress_tokens": [5],
    "suppress_tokens": [7],
    "max_length": 100,
    "pad_token_id": 257,
    "eos_token_id": 258,
}


@pytest.mark.slow_cases("t5")
@pytest.mark.parametrize("family", EACH)
def test_generate_gives_the_tokens_of_transformers(family, tmp_path):
    """Sources have different lengths. A folder holds all of the model."""
    model, eager, source = quantized_encoder_decoder(family), rounded_encoder_decoder(family), sources(family)
    options = {"max_new_tokens": 33, "do_sample": False, "no_repeat_ngram_size": 2}  # so that the text varies
    tokens = model.generate(**source, **options)
    assert torch.equal(tokens, eager.generate(**source, **options)) and tokens.unique().numel() > 12
    options["max_new_tokens"] = 8
    beams = {"num_beams": 3, **options}
    assert torch.equal(model.generate(**source, **beams), eager.generate(**source, **beams))
    assert not model.coverage.lost
    model.save_pretrained(tmp_path)
    loaded = LanguageModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(**source, **options), model.generate(**source, **options))


@pytest.mark.compiled
@torch.no_grad()
def test_calls_with_a_cache():
    """The first call reads the source; later ones find it in the cache."""
    model, eager, source = quantized_encoder_decoder("t5"), rounded_encoder_decoder("t5"), sources("t5")
    tokens = torch.randint(256, (3, 7), generator=torch.Generator().manual_seed(2))
    expected = eager(**source, decoder_input_ids=tokens).logits
    beams = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}  # of sources with different masks
    assert torch.equal(model.generate(**source, **beams), eager.generate(**source, **beams))
    first = model(**source, decoder_input_ids=tokens[:, :4])
    second = model(decoder_input_ids=tokens[:, 4:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], 1)
    assert (logits - expected).norm() < 1e-4 * expected.norm()
    encoded = model.encode(**{"source": source["input_ids"], "attention_mask": source["attention_mask"]})
    assert torch.equal(model(encoder_outputs=encoded, decoder_input_ids=tokens[:, :4]).logits, first.logits)
    assert first.past_key_values.layers[0].stored["cross_keys"].shape == (3, 4, 12, 16)


@pytest.mark.compiled
@pytest.mark.parametrize("family", DEFAULT)
def test_sampled_tokens(family):
    model, eager, source = quantized_encoder_decoder(family), rounded_encoder_decoder(family), sources(family)
    results = []
    for one in (model, eager):
        torch.manual_seed(3)
        results.append(one.generate(**source, do_sample=True, temperature=0.9, max_new_tokens=8))
    assert torch.equal(*results)


@pytest.mark.compiled
@torch.no_grad()
def test_activations_are_quantized_and_calibrated():
    """The decoder is calibrated with the text that the model generates."""
    float_model, source = tiny_encoder_decoder("t5", num_layers=1, initializer_factor=1.0), sources("t5")
    names, texts = [], [source["input_ids"][:1]]
    quantizer = MXQuantizer.from_recipe("mxfp8").set_algorithms("fast").set_kv_cache("mxfp8")
    model = quantize_language_model(float_model, quantizer, texts, stage=names.append)
    assert names == ["export", "optimize", "calibrate", "convert"]
    tokens = torch.randint(256, (3, 7), generator=torch.Generator().manual_seed(2))
    logits, expected = (one(**source, decoder_input_ids=tokens).logits.flatten() for one in (model, float_model))
    assert torch.cosine_similarity(logits, expected, 0) > 0.99
    stored = model.layers[0]
    assert len(stored["keys"]) == 2 and stored["keys"][0].dtype == torch.uint8
    assert stored["cross_keys"].dtype == torch.float32  # nothing is written to them


@pytest.mark.compiled
@torch.no_grad()
def test_lessons_train_the_encoder():
    """On sources like the lessons the trained encoder returns more like the float one, whose weights stay."""
    model, source = tiny_encoder_decoder("whisper"), sources("whisper")["input_features"]
    expected = SourceEncoder(model)(input_features=source)[0]
    quantizer, stages = MXQuantizer.from_recipe("mxfp4_weight_only"), []

    def error(result):
        return (result.encode(source).last_hidden_state - expected).norm()

    options = {"lessons": [source] * 24, "training": {"lr": 1e-3}}
    trained = quantize_language_model(model, quantizer, stage=stages.append, **options)
    assert stages == ["export", "distill", "calibrate", "convert"]
    assert 0 < error(trained) < 0.9 * error(quantized_encoder_decoder("whisper"))
    assert torch.equal(SourceEncoder(model)(input_features=source)[0], expected)
    with pytest.raises(MXError, match="reads input_features, not a source of"):
        quantize_language_model(model, quantizer, lessons=[torch.ones(1, 4, dtype=torch.long)])


def whisper_with_settings():
    eager = rounded_encoder_decoder("whisper")
    model = LanguageModel(
        quantized_encoder_decoder("whisper").program,
        eager.config,
        transformers.GenerationConfig(**WHISPER),
        encoder=quantized_encoder_decoder("whisper").encoder.program,
    )
    return model, eager


def test_whisper_is_calibrated_with_the_text_that_it_transcribes():
    """Its text begins with a language and a task; without them a trained Whisper writes another."""
    model, source = tiny_encoder_decoder("whisper"), sources("whisper")["input_features"][:1]
    model.generation_config = transformers.GenerationConfig(**WHISPER, language="de", task="transcribe")
    tokens = FloatSource(model, layers_of(model)).read(source)["input_ids"]
    assert tokens[0, :4].tolist() == [256, 291, 292, 295]
    assert torch.equal(tokens[:, 4:], model.generate(source, max_new_tokens=64, do_sample=False))


@pytest.mark.slow_except("options0")
@pytest.mark.parametrize(
    "options", [{"language": "de", "task": "translate"}, {}, {"language": "en", "return_timestamps": True}]
)
def test_whisper_takes_language_task_and_timestamps(options, monkeypatch):
    """Without a language, the model detects it."""
    model, eager = whisper_with_settings()
    monkeypatch.setattr(eager, "generation_config", transformers.GenerationConfig(**WHISPER))
    options = {**options, "max_new_tokens": 20, "force_unique_generate_call": True}
    tokens = model.generate(**sources("whisper"), **options)
    assert torch.equal(tokens, eager.generate(**sources("whisper"), **options))
    assert set(tokens[:, 1].tolist()) <= {290, 291}


@pytest.mark.compiled
def test_whisper_reads_long_audio_in_segments(monkeypatch):
    model, eager = whisper_with_settings()
    monkeypatch.setattr(eager, "generation_config", transformers.GenerationConfig(**WHISPER))
    features = torch.randn(2, 8, 230, generator=torch.Generator().manual_seed(4))
    options = {"language": "en", "return_timestamps": True, "attention_mask": torch.ones(2, 230, dtype=torch.long)}
    tokens = model.generate(features, **options)
    assert torch.equal(tokens, eager.generate(features, **options))


@pytest.mark.slow_except("options0", "options4")
@pytest.mark.parametrize(
    "options",
    [
        {"output_scores": True, "output_logits": True},
        {"force_unique_generate_call": True},
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        # the usual fallback
        {"temperature": (0.0, 0.4), "logprob_threshold": -1.0, "compression_ratio_threshold": 1.35},
    ],
)
@pytest.mark.compiled_cases("options0")
def test_whisper_returns_what_transformers_returns(options, monkeypatch):
    model, eager = whisper_with_settings()
    monkeypatch.setattr(eager, "generation_config", transformers.GenerationConfig(**WHISPER))
    options = {"return_dict_in_generate": True, "language": "en", "max_new_tokens": 8, **options}
    results = []
    for one in (model, eager):
        torch.manual_seed(3)
        results.append(one.generate(**sources("whisper"), **options))
    result, expected = results
    assert type(result) is type(expected) and result.keys() == expected.keys()
    assert torch.equal(result["sequences"], expected["sequences"])
    for name in ("scores", "logits"):
        for values, others in zip(result.get(name, ()), expected.get(name, ()), strict=True):
            assert torch.allclose(values, others, atol=1e-4)
    for part in ("self_attention_cache", "cross_attention_cache"):
        layers, others = (getattr(one["cache"], part).layers for one in results)
        for layer, other in zip(layers, others, strict=True):
            assert torch.allclose(layer.keys, other.keys, atol=1e-3)
            assert torch.allclose(layer.values, other.values, atol=1e-3)


@pytest.mark.slow
def test_whisper_falls_back_with_a_cache_of_codes():
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache("mxfp8")
    model = quantize_language_model(tiny_encoder_decoder("whisper"), quantizer)
    model.generation_config = transformers.GenerationConfig(**WHISPER)
    options = {"language": "en", "max_new_tokens": 4, "return_dict_in_generate": True}
    result = model.generate(**sources("whisper"), **options, temperature=(0.0, 0.4), logprob_threshold=-1.0)
    assert result.sequences.shape == (3, 8) and "cache" not in result


def test_get_encoder():
    """Its result takes the place of a source."""
    for family in DEFAULT:
        model, source = quantized_encoder_decoder(family), sources(family)
        name = model.main_input_name
        encoded = model.get_encoder()(**source)
        assert torch.equal(encoded[0], model.get_encoder()(source[name], source.get("attention_mask"))[0])
        mask = {key: value for key, value in source.items() if key != name}
        for options in ({"do_sample": False}, {"num_beams": 2}):
            options["max_new_tokens"] = 6
            tokens = model.generate(encoder_outputs=encoded, **mask, **options)
            assert torch.equal(tokens, model.generate(**source, **options))
    with pytest.raises(MXError, match="output_hidden_states=True asks for the hidden states"):
        model.get_encoder()(**source, output_hidden_states=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "mbart"])
def test_guidance(family):
    """Transformers calls the model with the last token, or a negative prompt, as a source alone."""
    model, eager, source = quantized_encoder_decoder(family), rounded_encoder_decoder(family), sources(family)
    options = {"max_new_tokens": 8, "do_sample": False}
    tokens = model.generate(**source, guidance_scale=3.0, **options)
    assert torch.equal(tokens, eager.generate(**source, guidance_scale=3.0, **options))
    assert not torch.equal(tokens, model.generate(**source, **options))
    options |= {"negative_prompt_ids": torch.full((3, 4), 9), "guidance_scale": 1.5}
    assert torch.equal(model.generate(**source, **options), eager.generate(**source, **options))


def test_options_that_no_encoder_decoder_has():
    model, source = quantized_encoder_decoder("t5"), sources("t5")
    with pytest.raises(MXError, match=r"^guidance_scale=2.0 calls .* only bart and mbart make .*t5 does not: leave it"):
        model.generate(**source, guidance_scale=2.0)
    for name in ("output_hidden_states", "output_attentions"):
        for one in (model, quantized_encoder_decoder("whisper")):
            with pytest.raises(MXError, match=rf"^{name}=True asks for the .*: a program returns logits alone; leave"):
                one.generate(
                    **sources("t5" if one is model else "whisper"), return_dict_in_generate=True, **{name: True}
                )
        with pytest.raises(MXError, match=rf"^{name}=True"):
            model(**source, decoder_input_ids=torch.zeros(3, 1, dtype=torch.long), **{name: True})


def test_bad_sources():
    model, whisper = quantized_encoder_decoder("t5"), quantized_encoder_decoder("whisper")
    tokens = torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(
        MXError, match=r"input_features must be torch.float32 of shape \(any, 8, 100\), not torch.float32"
    ):
        whisper(input_features=torch.zeros(2, 8, 99), decoder_input_ids=tokens)
    with pytest.raises(MXError, match=r"input_ids must be torch.int64 of shape \(any, any\), not torch.float32"):
        model.generate(torch.zeros(2, 3))
    with pytest.raises(MXError, match=r"input_ids of shape \(2, 0\) is empty: give one source at least"):
        model.generate(torch.zeros(2, 0, dtype=torch.long))
    for token in (-1, model.config.vocab_size):
        last = model.config.vocab_size - 1
        message = f"input_ids hold the token {token}, but the vocabulary of the model has the tokens 0 to {last}: use"
        with pytest.raises(MXError, match=message):
            model.generate(torch.tensor([[0, token, last]]))
    with pytest.raises(MXError, match=r"shape \(any, any\), not ndarray"):
        model.encode(torch.zeros(2, 3).numpy())
    with pytest.raises(MXError, match="input_ids must be tokens"):
        model(input_ids=tokens, decoder_input_ids=tokens[0])
    with pytest.raises(MXError, match=r"attention_mask must be of shape \(2, 3\), not \(2, 4\)"):
        model.encode(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4))
    with pytest.raises(MXError, match="the source is missing: give input_ids, or encoder_outputs"):
        model(decoder_input_ids=tokens)
    with pytest.raises(MXError, match="decoder_input_ids is missing"):
        model(input_ids=tokens)
    with pytest.raises(MXError, match="the source holds 3 sequences, the tokens 2"):
        model(input_ids=torch.zeros(3, 4, dtype=torch.long), decoder_input_ids=tokens)
    with pytest.raises(MXError, match="encoder_outputs must be the result of encode, not tuple"):
        model(decoder_input_ids=tokens, encoder_outputs=(torch.zeros(2, 4, 64),))
    with pytest.raises(MXError, match="return_token_timestamps needs the weights of attention"):
        whisper.generate(torch.zeros(1, 8, 100), return_token_timestamps=True)


def test_a_copy_gives_the_same_tokens():
    model, source = quantized_encoder_decoder("t5"), sources("t5")
    copied, options = copy.deepcopy(model), {"do_sample": False, "max_new_tokens": 6}
    assert type(copied) is type(model)
    assert torch.equal(copied.generate(**source, **options), model.generate(**source, **options))


def test_classes():
    model = quantized_encoder_decoder("t5")
    assert isinstance(model, LanguageModel) and type(model) is EncoderDecoder

    class Own(LanguageModel):
        pass

    class OwnOfSources(EncoderDecoder):
        pass

    programs = {"program": model.program, "encoder": model.encoder.program, "config": model.config}
    assert type(OwnOfSources(**programs)) is OwnOfSources
    with pytest.raises(MXError, match="Own reads no source, which t5 needs: extend EncoderDecoder of"):
        Own(**programs)


@pytest.mark.slow
def test_settings_of_one_of_both_programs():
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
    quantizer.set_module_name_regex(r".*encoder\.block.*", None).set_module_name_regex(r".*lm_head", None)
    quantizer.set_module_name_regex(r".*no_module", None)
    with pytest.warns(UserWarning, match="no_module' matches no operator") as caught:
        quantize_language_model(tiny_encoder_decoder("t5"), quantizer)
    assert sum("matches no operator" in str(warning.message) for warning in caught) == 1


@pytest.mark.compiled
@pytest.mark.parametrize("family", DEFAULT)
def test_compiled(family, compiler):
    model = quantize_language_model(tiny_encoder_decoder(family), MXQuantizer.from_recipe("mxfp4_weight_only"))
    check_compiled(model, **sources(family), do_sample=False, max_new_tokens=6)


@pytest.mark.compiled
def test_packages(tmp_path, compiler):
    check_packages(quantized_encoder_decoder("t5"), tmp_path, **sources("t5"), do_sample=False, max_new_tokens=6)


@pytest.mark.compiled
def test_a_table_of_positions_that_grows_is_refused():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    model = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**sizes)).eval()
    with pytest.raises(MXError, match=r"^M2M100[^\n]* gives other logits than with its own[^\n]*$"):
        quantize_language_model(model, MXQuantizer.from_recipe("mxfp8"))
