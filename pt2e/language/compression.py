"""Attention to compressed tokens: each window of a fixed number of tokens becomes one entry of the cache.

transformers keeps tensors whose lengths depend on the number of tokens: those since the last full window, and the
entries. Its windows count padding. Here the last tokens are a state of fixed size, like that of a convolution, and each
entry has a slot. Windows count from the first token of a text, so that a text gives what it gives without padding.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.pt2e.language.repeated_layers import LayerNumber


class Windows(NamedTuple):
    """The windows of tokens that may end among the tokens read.

    Args:
        rate: the number of tokens of a window.
        columns: (B, N) int64, the column of the last token of each; at least the number of tokens read: not among them.
        positions: (B, N) int64, the position of this token in its text; negative: in the padding.
        slots: (B, N) int64, where the entry belongs; those of no window share the last slot, which no token reads.
    """

    rate: int
    columns: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, cache: Any, rate: int, length: int) -> Windows:
        """Return the windows for a number of tokens after those of a cache."""
        padding = (cache.mask == 0).sum(1, keepdim=True)
        first = cache.length - padding
        columns = (-first - 1) % rate + rate * torch.arange(_most(length, rate), device=first.device)
        positions = first + columns
        ends = (columns < length) & (positions >= 0)
        return cls(rate, columns, positions, torch.where(ends, positions // rate, cache.slots - 1))

    def of_tokens(self, tokens: Tensor, size: int) -> Tensor:
        """Return what entries are made of, (B, N, W, size), of (B, W - 1 + S, C): the tokens read, and those before.

        An entry whose tokens have several vectors is made of the first ones of its first window, and so on."""
        number = tokens.shape[2] // size
        offsets = torch.arange(number * self.rate, device=tokens.device)
        columns = (self.columns[..., None] + offsets).clamp(max=tokens.shape[1] - 1)
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None, None]
        by_window = tokens[rows, columns].chunk(number, 2)
        return torch.cat([one[..., i * size : (i + 1) * size] for i, one in enumerate(by_window)], 2)

    def entries(self, compressor: Any, values: Tensor, gates: Tensor) -> Tensor:
        """Return the entries, (B, N, size), of values and gates of tokens, (B, W - 1 + S, C) each."""
        size = compressor.head_dim
        bias = torch.cat(compressor.position_bias.split(size, 1))
        values, gates = (self.of_tokens(tokens, size) for tokens in (values, gates))
        offsets = torch.arange(1 - len(bias), 1, device=values.device)
        before = self.positions[..., None] + offsets < 0
        gates = (gates + bias).masked_fill(before[..., None], torch.finfo(torch.float32).min)
        entries = compressor.kv_norm((values * gates.softmax(2, dtype=torch.float32).to(values.dtype)).sum(2))
        return _rotated(compressor, entries[:, None], (self.positions - self.rate + 1).clamp(min=0))[:, 0]

    def write(self, stored: Tensor, entries: Tensor) -> Tensor:
        """Write entries, (B, N, size), into their slots of (B, 1, slots, size); return the slots of all entries."""
        rows = torch.arange(stored.shape[0], device=stored.device)[:, None]
        stored.index_put_((rows, torch.zeros_like(rows), self.slots), entries.to(stored.dtype))
        return stored[:, :, : _most(stored.shape[2], self.rate)]


def _most(length: Any, rate: int) -> Any:
    """Return a number of windows that is never 0 or 1, of which a trace would make constants, and at least that of the
    windows that end among a number of tokens."""
    return length // rate + 2


def _rotated(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Return (B, heads, N, size) rotated by the angles of positions, (B, N)."""
    cos, sin = module.rotary_emb(x, position_ids=positions, layer_type=module.rope_layer_type)
    rotated: Tensor = sys.modules[type(module).__module__].apply_rotary_pos_emb(x, cos, sin)
    return rotated


def compressed_keys(
    cache: Any,
    /,
    compressor: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    past: Any,
    layer_idx: Any,
) -> tuple[Tensor, Tensor]:
    """Compress (B, S, hidden) tokens; return all entries, (B, 1, entries, size), and the bias, (B, 1, S, entries), that
    hides those that a token does not see: of windows that have not ended, or that an indexer did not choose."""
    layer, rate = cache.layers[LayerNumber.plain(layer_idx)], compressor.compress_rate
    indexer = getattr(compressor, "indexer", None)
    parts = [compressor] if indexer is None else [compressor, indexer]
    projected = [project(hidden_states) for part in parts for project in (part.kv_proj, part.gate_proj)]
    tokens = layer.update_conv_state(torch.cat(projected, -1).transpose(1, 2)).transpose(1, 2)
    values, gates, *of_index = tokens.split([one.shape[-1] for one in projected], -1)
    windows = Windows.of(cache, rate, hidden_states.shape[1])
    keys = windows.write(layer.stored["compressed_keys"], windows.entries(compressor, values, gates))
    ended = (position_ids[..., None] + 1) // rate > torch.arange(keys.shape[2], device=keys.device)
    if indexer is None:
        bias = keys.new_zeros(ended.shape)
    else:
        index_keys = windows.write(layer.stored["index_keys"], windows.entries(indexer, *of_index))
        query = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
        query = _rotated(indexer, query, position_ids).transpose(1, 2)
        scores = indexer.scorer(query, index_keys[:, 0], hidden_states)
        bias = _bias_of_highest(scores.masked_fill(~ended, -math.inf), indexer.index_topk)
    return keys, bias.masked_fill(~ended, -math.inf)[:, None]


def _bias_of_highest(scores: Tensor, number: int) -> Tensor:
    """Return 0 at the highest scores of each row, and minus infinity at the others."""
    padded = F.pad(scores, (0, number), value=-math.inf)  # there may be fewer scores
    highest = padded.topk(number).indices
    return torch.full_like(padded, -math.inf).scatter(-1, highest, 0.0)[..., : scores.shape[-1]]


#: method in a module of transformers -> what takes its place, with the cache before its arguments
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "DeepseekV4HCACompressor.forward": compressed_keys,
    "DeepseekV4CSACompressor.forward": compressed_keys,
}
