"""A GGUF file of a Llama with random codes, for llama.cpp to time."""

from pathlib import Path
from typing import Any

import numpy as np

from pt2mx.extras import import_extra
from tests.gguf_files import finish

#: type of a block -> the bytes of its scale, so that values are small numbers
_SCALES = {"MXFP4": bytes([121]), "Q4_0": np.float16(0.005).tobytes(), "Q8_0": np.float16(0.0005).tobytes()}


def write_random_llama(path: Path, kind: str, config: Any) -> None:
    """Write a file.

    Args:
        path: of the file.
        kind: the type of all matrices: MXFP4, Q4_0 or Q8_0.
        config: transformers' `LlamaConfig`; the embedding is the head, too.
    """
    gguf = import_extra("gguf", "gguf")
    block_type = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[block_type]
    random = np.random.default_rng(0)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, key_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    matrices = {"token_embd": (config.vocab_size, hidden)}
    norms = ["output_norm"]
    for layer in range(layers):
        shapes = {
            "attn_q": (heads * width, hidden),
            "attn_k": (key_heads * width, hidden),
            "attn_v": (key_heads * width, hidden),
            "attn_output": (hidden, heads * width),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        matrices |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    for name, (rows, columns) in matrices.items():
        blocks = random.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
        blocks[:, : len(_SCALES[kind])] = np.frombuffer(_SCALES[kind], np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=block_type)
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    finish(writer)
