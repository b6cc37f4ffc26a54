"""The metadata of a GGUF file that is written: what transformers' configuration says, under llama.cpp's keys."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_model import ARCHITECTURES, ROPE_TENSORS, config_of

#: transformers' types of models that llama.cpp stores as Llama
_LLAMAS = ("mistral", "mixtral")
#: field of a configuration -> the method of GGUFWriter that writes it
_FIELDS = {
    "num_hidden_layers": "add_block_count",
    "max_position_embeddings": "add_context_length",
    "hidden_size": "add_embedding_length",
    "intermediate_size": "add_feed_forward_length",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "vocab_size": "add_vocab_size",
    "sliding_window": "add_sliding_window",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "num_local_experts": "add_expert_count",
    "num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "bos_token_id": "add_bos_token_id",
    "eos_token_id": "add_eos_token_id",
    "pad_token_id": "add_pad_token_id",
}
#: fields of a configuration that do not change what a model computes, or that tensors and tokenizers decide
_FREE = re.compile(
    r"dtype|architectures|transformers_version|_name_or_path|initializer_range|use_cache|.*(dropout|pdrop)|model_type"
    r"|pretraining_tp|tie_word_embeddings|quantization_config|.*_token_id|cache_implementation|output_.*|return_dict"
    r"|router_.*|id2label|label2id|problem_type|chunk_size_feed_forward|is_encoder_decoder|num_labels|.*_jitter_noise"
)


def architecture_named(config: Any) -> str:
    """Return llama.cpp's name of a configuration's architecture.

    Raises:
        MXError: for an architecture that is not in `ARCHITECTURES`.
    """
    kind = "llama" if config.model_type in _LLAMAS else config.model_type
    for name, row in ARCHITECTURES.items():
        if row.model_type == kind:
            return name
    raise MXError(f"{config.model_type!r} cannot be written as GGUF: pt2mx writes {', '.join(ARCHITECTURES)}")


def add_metadata(writer: Any, config: Any) -> None:
    """Add what a configuration says to a GGUFWriter."""
    gguf, rope = import_extra("gguf", "gguf"), _rope(config)
    writer.add_type("model")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for field, method in _FIELDS.items():
        value = getattr(config, field, None)
        value = value[0] if isinstance(value, list) else value
        if value is not None and not (field == "sliding_window" and config.model_type in _LLAMAS):
            getattr(writer, method)(value)
    width = ARCHITECTURES[architecture_named(config)].expert_width
    if getattr(config, width, None) is not None:
        writer.add_expert_feed_forward_length(getattr(config, width))
    head = _head(config)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if original is not None and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope" and original:
        factor = config.max_position_embeddings / original
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or scale)


def rope_tensors(config: Any) -> dict[str, Tensor]:
    """Return the tensors that scale the frequencies of RoPE, in float32.

    Raises:
        MXError: for a scaling that GGUF has not.
    """
    rope = _rope(config)
    kind = rope["rope_type"]
    if kind in ("default", "linear", "yarn"):
        return {}
    if kind == "longrope":
        factors: dict[str, Any] = dict(zip(ROPE_TENSORS[1:], (rope["long_factor"], rope["short_factor"]), strict=True))
    elif kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        head = _head(config)
        frequencies = rope["rope_theta"] ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
        factors = {ROPE_TENSORS[0]: frequencies / ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].double()}
    else:
        raise MXError(f"GGUF has no RoPE of the type {kind!r}: it has default, linear, yarn, longrope and llama3")
    return {name: torch.as_tensor(values, dtype=torch.float32) for name, values in factors.items()}


def check_config(file: GGUFFile, config: Any) -> None:
    """Raise an `MXError` where a file describes another model than a configuration."""
    ours, theirs = config.to_dict(), config_of(file).to_dict()
    for key, value in ours.items():
        if key == "head_dim":
            value = _head(config)
        if not _FREE.fullmatch(key) and not _equal(value, theirs.get(key, value if key != "sliding_window" else None)):
            raise MXError(
                f"a GGUF file cannot say that {key} of {type(config).__name__} is {value!r}: llama.cpp takes "
                f"{theirs.get(key)!r}; write another layout"
            )


def _rope(config: Any) -> dict[str, Any]:
    parameters = config.rope_parameters
    return parameters.get("full_attention", parameters)


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _equal(one: Any, other: Any) -> bool:
    """Compare values of JSON; floats of the file have 24 bits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-4)
    return one == other
