"""A decoder of transformers as one program: tokens and a cache in, logits out, the cache written in place.

One program serves for prompts of any length and for single tokens, so that both share their weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pt2mx.errors import MXError
from pt2mx.pt2e.language import attention
from pt2mx.pt2e.language.cache import LayerShapes, cache_within, empty_cache, layer_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIZE = Dim.DYNAMIC
#: inputs of the program -> the dimensions that may have any size; of `keys` and `values` one tensor a layer
DYNAMIC: dict[str, dict[int, Any]] = {
    "input_ids": {0: _SIZE, 1: _SIZE},
    "position_ids": {0: _SIZE, 1: _SIZE},
    "attention_mask": {0: _SIZE, 1: _SIZE},
    "start": {},
    "logits_to_keep": {0: _SIZE},
    "keys": {0: _SIZE, 2: _SIZE},
    "values": {0: _SIZE, 2: _SIZE},
}


class CachedDecoder(nn.Module):
    """A causal language model whose cache is an input."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        start: Tensor,
        logits_to_keep: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Read S tokens of each of B sequences, and write them into S slots of the cache.

        Args:
            input_ids: (B, S) int64.
            position_ids: (B, S) int64, the number of each token in its sequence.
            attention_mask: (B, L) int64, zero where the cache holds padding.
            start: (1,) int64, the slots that are taken.
            logits_to_keep: (T,) int64, the columns of `input_ids` whose logits are wanted.
            keys, values: one tensor (B, heads, L, width) a layer, changed.

        Returns:
            (B, T, vocabulary) logits.
        """
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=cache_within(keys, values, start),
            logits_to_keep=logits_to_keep,
            use_cache=True,
        ).logits


def export_decoder(model: PreTrainedModel) -> ExportedProgram:
    """Export a causal language model of transformers with its cache, for batches, prompts and caches of any size.

    Raises:
        MXError: for a model that keeps anything but keys and values, and one that cannot be exported.
    """
    example, usual = inputs(layer_shapes(model), model.device, model.dtype), model.config._attn_implementation
    if usual == "sdpa":
        attention.register()
        model.set_attn_implementation(attention.NAME)
    try:
        return export(CachedDecoder(model), example)
    except Exception as error:
        raise MXError(f"{type(model).__name__} cannot be exported with its cache: {error}") from error
    finally:
        model.set_attn_implementation(usual)


def export(decoder: nn.Module, example: dict[str, Any]) -> ExportedProgram:
    """Export what takes a decoder's inputs: the float decoder, or the converted one."""
    shapes = {
        name: [DYNAMIC[name]] * len(value) if isinstance(value, list) else DYNAMIC[name]
        for name, value in example.items()
    }
    with torch.no_grad():
        return torch.export.export(decoder, (), example, dynamic_shapes=shapes, strict=False)


def inputs(
    shapes: LayerShapes,
    device: torch.device,
    dtype: torch.dtype,
    tokens: Tensor | None = None,
) -> dict[str, Any]:
    """A decoder's inputs that read tokens, (B, S), without padding, into a cache of their length.

    Args:
        tokens: None: some for an export, for which no two extents may be equal.
    """
    ids = torch.zeros(2, 3, dtype=torch.long) if tokens is None else tokens
    batch, length = ids.shape
    slots, kept = (length + 2, length - 1) if tokens is None else (length, length)
    cache = empty_cache(shapes, batch, slots, device, dtype)
    return {
        "input_ids": ids.to(device),
        "position_ids": torch.arange(length, device=device).repeat(batch, 1),
        "attention_mask": torch.ones(batch, slots, dtype=torch.long, device=device),
        "start": torch.zeros(1, dtype=torch.long, device=device),
        "logits_to_keep": torch.arange(length - kept, length, device=device),
        "keys": [layer.keys for layer in cache.layers],
        "values": [layer.values for layer in cache.layers],
    }
