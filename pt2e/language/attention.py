"""Attention over a cache with a fixed number of slots.

Transformers' own mask and attention need three changes. A program of any length needs the mask even where it hides
nothing. Keys must not be copied for each query head. A row of padding, which sees nothing, must not become 0/0 in the
softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pt2mx.extras import import_extra

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: the name of attention and mask for transformers, in `config._attn_implementation`
ATTENTION = "pt2mx"
#: the name of the attention of packed images. transformers packs only for names with "flash"
PACKED_ATTENTION = "pt2mx_flash_packed"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of query (B, heads, S, D) over key, value (B, KV heads, L, D): (B, S, heads, D).

    The mask is (B, 1, S, L) booleans, the bias of positions (1, heads, S, L)."""
    grouped = query.shape[1] != key.shape[1]
    if position_bias is not None and attention_mask is not None:
        attention_mask = torch.where(attention_mask, position_bias, torch.finfo(position_bias.dtype).min)
    elif position_bias is not None:
        attention_mask = position_bias
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of packed images, (1, heads, P, D): (1, P, heads, D).

    A patch sees those with the same number in `cu_seq_lens_q`, (P,)."""
    return attend(module, query, key, value, (cu_seq_lens_q[:, None] == cu_seq_lens_q)[None, None], scaling)


def attend_locally(
    cache: Any, /, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor
) -> tuple[Tensor, None]:
    """Compute attention of GPT-Neo, (B, heads, S, D), with a window that counts from the slots of the queries.

    Transformers counts it from the end of the cache. The mask is (B, 1, S, L), zero where a key is visible. Scores are
    in float32, and not scaled."""
    if module.attention_type == "local":
        slots = cache.length + torch.arange(query.shape[2], device=query.device)
        near = slots[:, None] - torch.arange(key.shape[2], device=key.device) < module.config.window_size
        attention_mask = attention_mask.masked_fill(~near, torch.finfo(attention_mask.dtype).min)
    scores = query.float() @ key.float().transpose(-1, -2) + attention_mask
    return scores.softmax(-1).to(value.dtype) @ value, None


#: method in a module of transformers -> what takes its place, with the cache before its arguments
FUNCTIONS: dict[str, Callable[..., Any]] = {"GPTNeoSelfAttention._attn": attend_locally}


def mask_of(
    q_length: int, kv_length: int, q_offset: Tensor | int, kv_offset: int, device: torch.device, **kwargs: Any
) -> Tensor:
    """Return transformers' mask for `scaled_dot_product_attention`, (B, 1, S, L) booleans.

    It is never None. In a decoder each query sees its own key, also in padding."""
    masking = import_extra("transformers.masking_utils", "hf")
    sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    mask = masking.sdpa_mask(**sizes, device=device, **{**kwargs, **skips})
    if "allow_is_bidirectional_skip" in kwargs:  # of an encoder, or cross attention
        return mask
    queries = torch.arange(q_length, device=device) + q_offset
    return mask | (queries[:, None] == torch.arange(kv_length, device=device) + kv_offset)


@contextmanager
def with_attention(model: PreTrainedModel) -> Iterator[None]:
    """Replace transformers' scaled dot product attention in a model by this one."""
    original = model.config._attn_implementation
    if original == "sdpa":
        register_attention()
        model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(original)


def register_attention() -> None:
    """Register attention and mask with transformers."""
    functions: list[tuple[str, str, str, Callable[..., Any]]] = [
        (ATTENTION, "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", attend),
        (ATTENTION, "transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS", mask_of),
        (PACKED_ATTENTION, "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", attend_packed),
    ]
    for attention, module, table, function in functions:
        getattr(import_extra(module, "hf"), table).register(attention, function)
