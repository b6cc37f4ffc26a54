"""GGUF files of tiny language models, written by the package `gguf` as llama.cpp's converter writes them."""

import re
from pathlib import Path

import numpy as np
import torch

import pt2mx
from pt2mx.pt2e.models.gguf_blocks import BLOCK_TYPES

#: transformers' type of model -> llama.cpp's architecture
_ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}


def write_gguf(
    model: torch.nn.Module,
    path: Path,
    types: dict[str, str] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    left_out: str | None = None,
) -> Path:
    """Write a model of transformers.

    Args:
        model: the model, in float32.
        path: the file.
        types: regular expression of the file's tensors -> their type; others are F32.
        extra: tensors of the file that are none of the model.
        left_out: a tensor of the file to leave out.
    """
    import gguf

    config, kind = model.config, model.config.model_type
    architecture = _ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in _tensors(model).items():
        stem, suffix = name.rsplit(".", 1)
        stored = f"{names.get_name(stem)}.{suffix}" if names.get_name(stem) else f"{names.get_name(name)}.weight"
        values = tensor.detach().numpy()
        if architecture == "llama" and (projection := re.search(r"attn_([qk])\.", stored)):
            heads = config.num_attention_heads if projection[1] == "q" else config.num_key_value_heads
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        if kind.startswith("gemma") and stored.endswith("norm.weight"):
            values = values + 1
        chosen = next((to for pattern, to in (types or {}).items() if re.fullmatch(pattern, stored)), "F32")
        to = gguf.GGMLQuantizationType[chosen]
        if stored != left_out:
            writer.add_tensor(stored, _blocks(np.ascontiguousarray(values), to), raw_dtype=to)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    finish(writer)
    return path


def finish(writer) -> None:
    """Write the file of a `gguf.GGUFWriter`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(values: np.ndarray, to) -> np.ndarray:
    """Return the bytes of values in a type; gguf has no quantizer of NVFP4."""
    import gguf

    if to.name != "NVFP4":
        return gguf.quantize(values, to)
    scale, data = pt2mx.quantize_mx(torch.from_numpy(values), "nvfp4", tensor_scale=torch.tensor(2.0**-8))
    return BLOCK_TYPES[to.name].to_blocks("weight", data, scale).numpy()


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors by their names in a checkpoint, the experts of a layer in one tensor; tied weights once."""
    tied = model.all_tied_weights_keys or {}
    tensors = {}
    for name, tensor in model.named_parameters():
        if name in tied:
            continue
        if model.config.model_type == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if model.config.model_type == "gpt_oss" and ".experts." in name:
            tensors |= _experts_of_gpt_oss(name, tensor)
            continue
        names = ("w1", "w3", "w2") if "block_sparse_moe" in name else ("gate_proj", "up_proj", "down_proj")
        if name.endswith("experts.gate_up_proj"):
            halves = tensor.chunk(2, 1)
            stem = name.removesuffix("gate_up_proj")
            tensors |= {f"{stem}{part}.weight": half for part, half in zip(names, halves, strict=False)}
        elif name.endswith("experts.down_proj"):
            tensors[f"{name.removesuffix('down_proj')}{names[2]}.weight"] = tensor
        else:
            tensors[name] = tensor
    return tensors


def _experts_of_gpt_oss(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight (E, K, N), or a bias (E, N), as the weights (E, N, K) or the biases of projections."""
    suffix, tensor = ("bias", tensor) if name.endswith("_bias") else ("weight", tensor.mT)
    stem = name.removesuffix("_bias")
    if not stem.endswith("gate_up_proj"):
        return {f"{stem}.{suffix}": tensor}
    path = stem.removesuffix("gate_up_proj")
    return {f"{path}gate_proj.{suffix}": tensor[:, 0::2], f"{path}up_proj.{suffix}": tensor[:, 1::2]}


def _add_metadata(writer, config) -> None:
    import gguf

    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for field, add in {
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }.items():
        if getattr(config, field, None) is not None:
            add(getattr(config, field))
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts is not None:
        writer.add_expert_count(experts)
    if config.model_type.startswith(("gemma", "gpt_oss")):
        writer.add_sliding_window(config.sliding_window)
