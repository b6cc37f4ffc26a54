"""Attention with quantized matmuls, as an attention function of transformers.

Models choose it with `config._attn_implementation`. Their own modules still project, rotate and cache. The cache holds
keys and values in high precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pt2mx.functional import fake_quantize_mx
from pt2mx.torchmx.config import MXConfig, QAttentionConfig

#: the name under which transformers knows it
ATTENTION = "pt2mx"


def register_attention() -> None:
    """Register `mx_attention` with transformers. It accepts the masks of the eager attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(ATTENTION, mx_attention)
    AttentionMaskInterface.register(ATTENTION, eager_mask)


def mx_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Return `softmax(query @ key.T * scaling + mask) @ value` with quantized operands of both matmuls.

    Blocks lie along the reduced dimension. `module.qconfig` gives the formats; an operand without one stays in high
    precision.

    Args:
        module: an attention module of transformers.
        query: (B, H, Q, D).
        key, value: (B, KV, K, D); H is a multiple of KV.
        attention_mask: (B, 1, Q, K), added to the scores.
        scaling: by default 1 / sqrt(D).
        unused: the model's arguments for other attention functions; the mask expresses windows and causality.

    Returns:
        output: (B, Q, H, D).
        weights: (B, H, Q, K), as they enter the second matmul.
    """
    of_query, of_key, of_value, of_weights = _configs(getattr(module, "qconfig", None))
    query = _quantized(query, of_query, -1)
    # quantize before repeating for the heads that share them: the same values, computed once
    key = _repeated(_quantized(key, of_key, -1), query)
    value = _repeated(_quantized(value, of_value, -2), query)
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    weights = _quantized(weights, of_weights, -1)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _configs(config: QAttentionConfig | None) -> Sequence[MXConfig | None]:
    """Return the configs of queries, keys, values and attention weights."""
    if config is None:
        return (None,) * 4
    return config.query_config, config.key_config, config.value_config, config.attention_weights_config


def _quantized(x: Tensor, config: MXConfig | None, axis: int) -> Tensor:
    return x if config is None else fake_quantize_mx(x, config.spec, axis=axis)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """(B, KV, K, D) -> (B, H, K, D)."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)
