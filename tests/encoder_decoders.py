"""Tiny encoder-decoders of transformers, with random weights, and their inputs."""

import functools

import torch

from pt2mx import MXQuantizer, quantize_language_model
from pt2mx.extras import import_extra
from tests.language_models import round_weights

transformers = import_extra("transformers", "hf")

#: large weights, so that the text varies
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "initializer_factor": 3.0}
_BART = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "init_std": 0.3,
    "tie_word_embeddings": False,
}
_TEXT = {**_BART, "max_position_embeddings": 128}
_MOONSHINE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_WHISPER = {**_BART, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 128}
_TOKENS = {"vocab_size": 300, "pad_token_id": 257, "bos_token_id": 256, "eos_token_id": 258}

#: family -> transformers' config class and its fields
FAMILIES = {
    "t5": ("T5Config", {**_T5, "tie_word_embeddings": False}),
    "mt5": ("MT5Config", _T5),
    "bart": ("BartConfig", _TEXT),
    "mbart": ("MBartConfig", _TEXT),
    "marian": ("MarianConfig", _TEXT),
    "pegasus": ("PegasusConfig", _TEXT),
    "whisper": ("WhisperConfig", _WHISPER),
    "moonshine": ("MoonshineConfig", _MOONSHINE),
}


def tiny_encoder_decoder(family: str, **fields):
    """Return a model of that family, in evaluation mode, whose text has no end."""
    name, small = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**small, **_TOKENS, "decoder_start_token_id": 256, **fields})
    kinds = (transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq)
    model = kinds[family in ("whisper", "moonshine")].from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model


@functools.cache
def quantized_encoder_decoder(family: str, recipe: str = "mxfp4_weight_only"):
    """Quantize a tiny model by a recipe, once for all tests, which do not change it."""
    return quantize_language_model(tiny_encoder_decoder(family), MXQuantizer.from_recipe(recipe))


@functools.cache
def rounded_encoder_decoder(family: str):
    """Return the eager model with its weights in MXFP4."""
    return round_weights(tiny_encoder_decoder(family))


def sources(family: str) -> dict[str, torch.Tensor]:
    """Return three inputs, of different lengths where the encoder takes any length."""
    generator = torch.Generator().manual_seed(1)
    if family == "whisper":
        return {"input_features": torch.randn(3, 8, 100, generator=generator)}
    if family == "moonshine":
        source, name = torch.randn(3, 4000, generator=generator), "input_values"
    else:
        source, name = torch.randint(256, (3, 12), generator=generator), "input_ids"
    mask = torch.ones(source.shape, dtype=torch.long)
    for row in (1, 2):
        mask[row, source.shape[1] * (4 - row) // 4 :] = 0
    return {name: source.where(mask.bool(), 257 if name == "input_ids" else 0), "attention_mask": mask}
