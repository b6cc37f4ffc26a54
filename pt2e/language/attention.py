"""Attention over a cache of fixed length, by the name under which transformers finds it.

transformers' own masks and attention serve but for three things: a mask may be left out where nothing is hidden, which
a program of any length cannot do; keys are copied once a query head; and of a row of padding, which sees nothing, the
softmax is 0/0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx.extras import import_extra

#: what `config._attn_implementation` says
NAME = "pt2mx"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (B, heads, S, D), key, value: (B, heads of keys, L, D), mask: (B, 1, S, L) -> (B, S, heads, D)."""
    grouped = query.shape[1] != key.shape[1]
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return found.transpose(1, 2).contiguous(), None


def mask_of(
    q_length: int, kv_length: int, q_offset: Tensor | int, kv_offset: int, device: torch.device, **kwargs: Any
) -> Tensor:
    """The mask that transformers makes for `torch.nn.functional.scaled_dot_product_attention`, never left out, in which
    each query sees its own key: (B, 1, S, L) booleans."""
    masking = import_extra("transformers.masking_utils", "hf")
    extents = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    mask = masking.sdpa_mask(**extents, device=device, **{**kwargs, **skips})
    queries = torch.arange(q_length, device=device) + q_offset
    return mask | (queries[:, None] == torch.arange(kv_length, device=device) + kv_offset)


def register() -> None:
    """Make both known to transformers."""
    functions: list[tuple[str, str, Callable[..., Any]]] = [
        ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", attend),
        ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS", mask_of),
    ]
    for module, name, function in functions:
        getattr(import_extra(module, "hf"), name).register(NAME, function)
