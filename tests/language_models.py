"""Tiny causal language models of transformers, with random weights and a tokenizer of bytes."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.export import ExportedProgram

import pt2mx
from pt2mx import LanguageModel, MXQuantizer, quantize_language_model
from pt2mx.extras import import_extra
from pt2mx.pt2e.language import decoder
from tests.fresh_process import run_program

transformers = import_extra("transformers", "hf")

_GENERATE = """
import torch
from pt2mx import LanguageModel
prompt, options, expected = torch.load("call.pt")
print(torch.equal(LanguageModel.from_pretrained("model").generate(*prompt, **options), expected))
"""
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_SMALL = {**_SIZES, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512}
_TOKENS = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
_WIDE = {**_SMALL, "head_dim": 16}
#: large weights of their own for the embedding and the head, so that the text varies
_RECURRENT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2}
_GRIFFIN = {"lru_width": 64, "attention_window_size": 8, "block_types": ["recurrent", "attention"]}
_NEO = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "window_size": 8,
    "attention_types": [[["global", "local"], 1]],
    "initializer_range": 0.2,
}
_DELTA_NET = {
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
#: two of four layers keep nothing
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
_JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
#: the last two layers read the keys and values of the first two
_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 32,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_GEMMA_3N = {"altup_num_inputs": 2, "laurel_rank": 32, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]}
_GEMMA_4 = {"global_head_dim": 32, "use_double_wide_mlp": True}
#: windows of 2 and of 4 tokens; an indexer that chooses 2 entries
_COMPRESSED = {
    **_RECURRENT,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "sliding_window": 8,
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}

#: family -> transformers' config class and its fields
FAMILIES = {
    "llama": ("LlamaConfig", _SMALL),
    "qwen2": ("Qwen2Config", _SMALL),
    "qwen3": ("Qwen3Config", _WIDE),
    "gemma2": ("Gemma2Config", {**_WIDE, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", {**_WIDE, "sliding_window": 8}),
    "gemma3n": ("Gemma3nTextConfig", {**_WIDE, **_SHARED, **_GEMMA_3N}),
    "gemma4": ("Gemma4TextConfig", {**_WIDE, **_SHARED, **_GEMMA_4}),
    "phi3": ("Phi3Config", _SMALL),
    "mistral": ("MistralConfig", {**_SMALL, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {**_SMALL, "num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", {**_WIDE, "num_local_experts": 4, "sliding_window": 8, "rope_parameters": None}),
    "smollm3": ("SmolLM3Config", _SMALL),
    "falcon": ("FalconConfig", {**_SIZES, "vocab_size": 300, "alibi": False}),
    "bloom": ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300}),
    "opt": ("OPTConfig", {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, "vocab_size": 300}),
    "gpt_neo": ("GPTNeoConfig", _NEO),
    "gptj": ("GPTJConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "rotary_dim": 16}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_SMALL, "num_experts": 4, "moe_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "glm4": ("Glm4Config", _WIDE),
    # recurrent layers
    "mamba": ("MambaConfig", {**_RECURRENT, "state_size": 8}),
    "mamba2": ("Mamba2Config", {**_RECURRENT, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2}),
    # recurrent layers and attention
    "falcon_h1": ("FalconH1Config", {**_SMALL, **_RECURRENT, **_MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 8}),
    "lfm2": ("Lfm2Config", {**_SMALL, **_RECURRENT, "layer_types": ["conv", "full_attention"]}),
    "qwen3_next": ("Qwen3NextConfig", {**_WIDE, **_RECURRENT, **_DELTA_NET}),
    "nemotron_h": ("NemotronHConfig", {**_SMALL, **_RECURRENT, **_NEMOTRON}),
    "jamba": ("JambaConfig", {**_SMALL, **_RECURRENT, **_JAMBA}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {**_SMALL, **_RECURRENT, **_GRIFFIN}),
    # compressed tokens
    "deepseek_v4": ("DeepseekV4Config", _COMPRESSED),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 512}),
}


def tiny_decoder(family: str, **fields):
    """Return a model of that family, in evaluation mode; `fields` replace fields of its config."""
    name, small = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**small, **_TOKENS, **fields})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@functools.cache
def exported_decoder(family: str, **fields) -> tuple[nn.Module, ExportedProgram]:
    """Return a tiny decoder and its program. They are made once for all tests, which change neither."""
    model = tiny_decoder(family, **fields)
    return model, decoder.export_decoder(model)


def quantized_decoder(
    family: str,
    quantizer: MXQuantizer,
    texts: Sequence[torch.Tensor] = (),
    stage: Callable[[str], None] = lambda name: None,
    **fields,
) -> LanguageModel:
    """Quantize a tiny decoder, whose export is made once for all tests."""
    model, program = exported_decoder(family, **fields)
    with mock.patch.object(decoder, "export_decoder", lambda model, length, images: program):
        return quantize_language_model(model, quantizer, texts, stage=stage)


@functools.cache
def decoder_by_recipe(recipe: str, family: str, **fields) -> LanguageModel:
    """Quantize a tiny decoder by a recipe, once for all tests, which do not change it."""
    return quantized_decoder(family, MXQuantizer.from_recipe(recipe), **fields)


@functools.cache
def decoder_of_codes(text: str, family: str) -> LanguageModel:
    """Quantize a tiny bfloat16 decoder to MXFP4 weights and a cache in a format, once for all tests."""
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache(text)
    return quantized_decoder(family, quantizer, dtype="bfloat16")


@functools.cache
def with_rounded_weights(family):
    """Return the eager decoder with rounded weights."""
    return round_weights(tiny_decoder(family))


def round_weights(model):
    """Round the weights of linear layers, embeddings, experts and convolutions to MXFP4 in place; return the model."""
    spec = pt2mx.MXSpec("mxfp4", scale_mode="even")
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "WhisperPositionalEmbedding":
                continue  # it is indexed, not looked up
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.copy_(pt2mx.fake_quantize_mx(module.weight, spec))
            elif type(module).__name__.endswith(("Experts", "HashRouter")):  # other routers stay in float
                for weight in module.parameters():
                    weight.copy_(pt2mx.fake_quantize_mx(weight, spec))
            elif type(module).__name__.endswith(("HyperConnection", "HyperHead")):
                for weight in (one for one in module.parameters() if one.dim() == 2):
                    weight.copy_(pt2mx.fake_quantize_mx(weight, spec))
            elif isinstance(module, nn.Conv1d):  # blocks along the input channels, or along taps where it is depthwise
                axis = 2 if module.groups > 1 and module.weight.shape[1] == 1 else 1
                module.weight.copy_(pt2mx.fake_quantize_mx(module.weight, spec.replace(axis=axis)))
    return model


def divisible_decoder(family: str, **fields):
    """Return a decoder whose sizes two ranks can divide and whose text has no end. Its biases and norms are random."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = tiny_decoder(family, **{"intermediate_size": 128, **ends, **fields})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # zero biases would hide that they are added twice
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


def tokenizer_of_bytes(merges: Sequence[tuple[str, str]] = ()):
    """A tokenizer of bytes, with tokens for the beginning and the end of a text, and for pairs that it merges."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def checkpoint(family: str, folder: Path, tokenizer: bool = True, **fields) -> str:
    """Return the folder of a checkpoint, as `save_pretrained` writes it; `fields` replace fields of its config."""
    tiny_decoder(family, **fields).save_pretrained(folder)
    if tokenizer:
        tokenizer_of_bytes().save_pretrained(folder)
    return str(folder)


def check_compiled(model: LanguageModel, *prompt: torch.Tensor, **options) -> None:
    """Check that a compiled model generates what it did before."""
    expected = model.generate(*prompt, **options)
    model.compile()
    assert torch.equal(model.generate(*prompt, **options), expected)


def check_packages(model: LanguageModel, folder: Path, *prompt: torch.Tensor, **options) -> None:
    """Check that a model generates the same with the packages of its folder."""
    model.save_pretrained(folder)
    model.write_packages(folder)
    loaded = LanguageModel.from_pretrained(folder)
    assert torch.equal(loaded.generate(*prompt, **options), model.generate(*prompt, **options))


def check_another_process(model: LanguageModel, folder: Path, *prompt: torch.Tensor, **options) -> None:
    """Check that a process that loads the folder of a model generates the same."""
    model.save_pretrained(folder / "model")
    torch.save((prompt, options, model.generate(*prompt, **options)), folder / "call.pt")
    finished = run_program(_GENERATE, "generate.py", folder)
    assert (finished.status, finished.out) == (0, "True\n"), finished.err


def padded(batch: int = 3, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of prompts of different lengths, padded on the left, and their mask."""
    ids = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 3 * row] = 0
    return ids.where(mask.bool(), 257), mask
