"""The methods that transformers' `generate` calls, and the caches that it fills."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.language.arguments import check_length, check_tokens
from pt2mx.pt2e.language.cache import DecoderCache, Layers, empty_cache, grow, room_for

_generation = import_extra("transformers.generation.utils", "hf")


class Generates(_generation.GenerationMixin):  # type: ignore[name-defined]
    """Generates tokens with a cache that has room for them."""

    main_input_name, base_model_prefix, _is_stateful = "input_ids", "", False
    config: Any
    layers: Layers
    device: torch.device

    def _cache_for(self, tokens: Tensor, cache: Any) -> DecoderCache:
        """Return the cache to write to: a cache of this model, or a new one that grows in place of an empty one."""
        check_tokens(tokens)
        if isinstance(cache, DecoderCache):
            if cache.grows and cache.length + tokens.shape[1] > cache.slots:
                grow(cache, room_for(cache.length + tokens.shape[1]))
            return cache
        if cache is not None and cache.get_seq_length():
            raise MXError(f"past_key_values is a filled {type(cache).__name__}: give what new_cache or a call gave")
        cache = self.new_cache(tokens.shape[0], tokens.shape[-1])
        cache.grows = True
        return cache

    def new_cache(self, batch: int, tokens: int) -> DecoderCache:
        """Make an empty cache for `past_key_values`.

        Args:
            batch: the number of sequences.
            tokens: the number of tokens of each that must fit.

        Returns:
            transformers' `Cache`.
        """
        cache = empty_cache(self.layers, batch, room_for(tokens), self.device)
        for tensor in (tensor for layer in cache.layers for tensor in layer.tensors):
            torch._dynamo.mark_static_address(tensor)  # lets CUDA graphs write to them
        return cache

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: object, batch_size: int, max_cache_length: int
    ) -> None:
        check_length(self.config, max_cache_length)
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, DecoderCache):
            if max_cache_length > cache.slots:
                grow(cache, room_for(max_cache_length))
        elif generation_config.use_cache:
            sequences = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            model_kwargs["past_key_values"] = self.new_cache(sequences, max_cache_length)

    def _optimize_model_for_decode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _supports_logits_to_keep(self) -> bool:
        return True

    def is_remote_code(self) -> bool:
        """Return False: the code of the model is part of pt2mx.

        Returns:
            False.
        """
        return False
