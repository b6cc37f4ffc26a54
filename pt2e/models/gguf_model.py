"""The model of a GGUF file: transformers' configuration and tokenizer, made of the metadata."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.build_model import check_counts
from pt2mx.pt2e.models.checkpoint_files import CONFIG
from pt2mx.pt2e.models.gguf_file import DTYPES, SUFFIX, GGUFFile

ARCHITECTURE = "general.architecture"
#: types whose values without a scale of the whole tensor are exact in bfloat16 and float16 models
_PACKED = ("MXFP4", "NVFP4")
#: tensors that are no parameters: factors of the frequencies of RoPE
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Architecture:
    """The form in which llama.cpp stores models of an architecture.

    Args:
        model_type: transformers' type of model.
        permuted: True where the rows of queries and keys alternate between the halves that RoPE rotates.
        norm_offset: what the file adds to the weights of norms.
        layers_of_wide_scale: the number of layers of the one model whose attention is scaled by the width of all heads.
        experts: the field of the configuration with the number of experts.
        of_experts: other fields of models with experts.
        expert_width: the field of the configuration with the width of an expert.
        partial_rotary: True where the file says how many values of a head RoPE rotates.
        reads_tokenizer: False where transformers (5.24) fails to read the tokenizer: for its scaling of RoPE.
        yarn: its settings of YaRN, apart from the factor and the original length.
    """

    model_type: str
    permuted: bool = False
    norm_offset: float = 0.0
    layers_of_wide_scale: int | None = None
    experts: str = "num_experts"
    of_experts: Mapping[str, Any] = field(default_factory=dict)
    expert_width: str = "moe_intermediate_size"
    partial_rotary: bool = False
    reads_tokenizer: bool = True
    yarn: dict[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True, experts="num_local_experts", of_experts={"model_type": "mixtral"}),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", of_experts={"norm_topk_prob": True}),
    "gemma2": Architecture("gemma2", norm_offset=1.0, layers_of_wide_scale=46),
    "gemma3": Architecture("gemma3_text", norm_offset=1.0, layers_of_wide_scale=62),
    "phi3": Architecture("phi3", partial_rotary=True),
    "gpt-oss": Architecture(
        "gpt_oss",
        experts="num_local_experts",
        expert_width="intermediate_size",
        reads_tokenizer=False,
        yarn={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
}

#: key of the metadata, after the architecture where it begins so -> field of a configuration
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_TOKENS = "tokenizer.ggml.tokens"


def gguf_in(name: str | os.PathLike[str]) -> Path | None:
    """Return a GGUF file, or the one in a folder without config.json; None for other checkpoints."""
    path = Path(name)
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / CONFIG).is_file():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise MXError(f"{str(name)!r} holds {len(files)} GGUF files: give one of them, such as {str(files[0])!r}")
    return files[0] if files else None


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the row of `ARCHITECTURES` for a file."""
    name = file.text(ARCHITECTURE)
    if name not in ARCHITECTURES:
        raise MXError(
            f"{str(file.path)!r} holds a model of the architecture {name!r}: pt2mx reads {', '.join(ARCHITECTURES)}; "
            "give the checkpoint of Hugging Face"
        )
    return ARCHITECTURES[name]


def config_of(file: GGUFFile) -> Any:
    """Return transformers' configuration of the model, in the dtype of the file's floats."""
    row = architecture_of(file)
    with user_errors(f"read the configuration in {str(file.path)!r}"):
        config = _config(file, row)
        config.dtype = _dtype(file)
    return config


def _config(file: GGUFFile, row: Architecture) -> Any:
    transformers = import_extra("transformers", "hf")
    name = file.text(ARCHITECTURE)
    values = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items()}
    # tokens that the file has not are none of the model, whatever the defaults of its configuration
    fields: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    fields |= {field: values[key] for key, field in _FIELDS.items() if key in values}
    fields |= {"model_type": row.model_type, "tie_word_embeddings": "output.weight" not in file.entries}
    fields["attention_bias"] = "blk.0.attn_q.bias" in file.entries
    if _TOKENS in values:
        fields.setdefault("vocab_size", len(values[_TOKENS]))
    if values.get("expert_count"):
        fields |= {row.experts: values["expert_count"], **row.of_experts}
    head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    if row.partial_rotary and "rope.dimension_count" in values:
        fields["partial_rotary_factor"] = values["rope.dimension_count"] / head
    if row.layers_of_wide_scale is not None:
        is_wide = fields["num_hidden_layers"] == row.layers_of_wide_scale
        fields["query_pre_attn_scalar"] = fields["hidden_size"] // fields["num_attention_heads"] if is_wide else head
    if (scaling := _rope_scaling(file, values, head, fields.get("rope_theta"))) is not None:
        fields["rope_scaling"] = scaling | (row.yarn if scaling["rope_type"] == "yarn" else {})
    check_counts(fields, [entry.shape for entry in file.entries.values()], str(file.path))
    return transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def tokenizer_of(path: Path) -> Any:
    """Return transformers' tokenizer of a GGUF file; None where the file has no vocabulary, and for architectures whose
    tokenizers transformers does not read from GGUF, such as gpt-oss."""
    transformers = import_extra("transformers", "hf")
    file = GGUFFile(path)
    with user_errors(f"read the tokenizer in {str(path)!r}"):
        if _TOKENS not in file.metadata or not _reads_tokenizer(file):
            return None
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _reads_tokenizer(file: GGUFFile) -> bool:
    """Return whether transformers reads the tokenizer of a file: since version 5.24 by its kind, before by the
    architecture of the model."""
    row = architecture_of(file)
    architectures = getattr(import_extra("transformers.integrations.ggml", "hf"), "GGUF_TO_FAST_CONVERTERS", None)
    if architectures is not None:
        return row.model_type in architectures
    if not row.reads_tokenizer:
        return False
    kinds = import_extra("transformers.integrations.gguf.gguf_tokenizer_mapping", "hf").GGUF_TOKENIZER_TYPES
    return file.metadata.get("tokenizer.ggml.model") in kinds


def _dtype(file: GGUFFile) -> torch.dtype:
    """Return the half type of the file's floats where they are exact in it; float32 for others."""
    if any(name.endswith(".scale") for name in file.entries):
        return torch.float32
    types = {entry.type for entry in file.entries.values()} - {*_PACKED, "F32"}
    return DTYPES[types.pop()] if len(types) == 1 and types <= {"F16", "BF16"} else torch.float32


def _rope_scaling(file: GGUFFile, values: dict[str, Any], head: int, theta: float | None) -> dict[str, Any] | None:
    frequencies, long, short = (file.values(name).tolist() if name in file.entries else None for name in ROPE_TENSORS)
    if long is not None:
        # transformers takes `original_max_position_embeddings` from its own field
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    if frequencies is not None:
        if not _is_llama3(frequencies, head, theta or 1e4):
            raise MXError(
                f"{str(file.path)!r} scales RoPE by factors other than Llama 3's: give the checkpoint of Hugging Face"
            )
        bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        return {"rope_type": "llama3", "factor": max(frequencies), **bounds}
    kind = values.get("rope.scaling.type", "none")
    if kind == "none" or "rope.scaling.factor" not in values:
        return None
    if kind not in ("linear", "yarn"):
        raise MXError(f"{str(file.path)!r} scales RoPE by {kind!r}: give the checkpoint of Hugging Face")
    scaling = {"rope_type": kind, "factor": values["rope.scaling.factor"]}
    context = values.get("rope.scaling.original_context_length")
    if kind == "yarn" and context:
        scaling["original_max_position_embeddings"] = context
    return scaling


def _is_llama3(factors: list[float], head: int, theta: float) -> bool:
    """Return True for the factors of Llama 3: frequencies of fewer than 1 rotation in 8192 positions are divided, those
    of more than 4 are kept, and those between are interpolated."""
    rotations = 8192 * theta ** (-torch.arange(0, head, 2, dtype=torch.float64) / head) / (2 * math.pi)
    share = ((rotations - 1) / 3).clamp(0, 1)
    expected = 1 / ((1 - share) / max(factors) + share)
    return len(expected) == len(factors) and torch.allclose(expected, torch.tensor(factors).double(), rtol=1e-4)
