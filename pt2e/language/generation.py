"""The methods that transformers' `generate` calls, and the caches that it fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.language.arguments import check_length, check_step, check_tokens, check_vocabulary
from pt2mx.pt2e.language.cache import DecoderCache, Layers, empty_cache, grow, room_for
from pt2mx.pt2e.language.cache_name import CACHE
from pt2mx.pt2e.language.merge_images import ImageInputs
from pt2mx.pt2e.language.positions import check_positions
from pt2mx.pt2e.language.sampling import Choice, processors_of
from pt2mx.pt2e.language.step import Step
from pt2mx.pt2e.language.step_loop import choose_tokens
from pt2mx.pt2e.language.stopping import Stopping

if TYPE_CHECKING:
    from pt2mx.pt2e.language.runtime import Runner

_generation = import_extra("transformers.generation.utils", "hf")


class Generates(_generation.GenerationMixin):  # type: ignore[name-defined]
    """Generates tokens with a cache that has room for them."""

    main_input_name, base_model_prefix, _is_stateful = "input_ids", "", False
    config: Any
    layers: Layers
    device: torch.device
    _images: ImageInputs | None
    _image_inputs: Callable[..., dict[str, Any]]
    #: the step of the last call of `generate`, if it is captured, with its cache
    _step: Step | None = None

    if TYPE_CHECKING:

        @property
        def runner(self) -> Runner: ...

        @property
        def positions(self) -> dict[str, int]: ...

    def _inputs_of(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: DecoderCache,
        given: Mapping[str, Any],
    ) -> tuple[dict[str, Any], Tensor]:
        """Return the inputs of the program for the next tokens, (B, S), and the mask, (B, slots) int64.

        Raises:
            MXError: for more tokens than fit into the cache or than the model has positions, a token outside the
                vocabulary, and a mask or positions of other shapes.
        """
        filled, slots = cache.length, cache.slots
        check_step(input_ids, attention_mask, position_ids, cache.batch_size, filled, slots)
        check_length(self.config, filled + input_ids.shape[1])
        batch, length = input_ids.shape
        # later tokens are mostly the model's own, and a GPU would wait for the check
        if (length > 1 or not filled or input_ids.device.type == "cpu") and self._images is None:
            check_vocabulary("input_ids", input_ids, self.config.get_text_config(decoder=True).vocab_size)
        gives_positions = position_ids is not None
        mask = torch.ones(batch, slots, dtype=torch.long, device=self.device)
        if attention_mask is not None:
            mask[:, : attention_mask.shape[1]] = attention_mask
        if position_ids is None:
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, filled : filled + length]
        check_positions(self.positions, filled, position_ids, gives_positions)
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
        return inputs | self._image_inputs(given, inputs, mask, cache), mask

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
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, DecoderCache):
            cache._is_user_defined = True  # as transformers marks it
            grows = max_cache_length > cache.slots
            if self._step is not None and (grows or self._step.cache is not cache):
                self._step = None  # frees the tensors of its cache
            if grows:
                grow(cache, room_for(max_cache_length))
        elif generation_config.use_cache:
            sequences = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            if self._step is not None and not self._step.frees_cache_for(sequences, room_for(max_cache_length)):
                self._step = None  # frees its cache before there is another
            model_kwargs[CACHE] = (
                self.new_cache(sequences, max_cache_length) if self._step is None else self._step.take_cache()
            )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate as transformers' loop does, by one `Step` a token; by that loop where a step does not cover it."""
        stopping, processors = Stopping(stopping_criteria, input_ids), processors_of(logits_processor)
        if (
            processors is None
            or synced_gpus
            or stopping.longest is None
            or not self._covers(generation_config, model_kwargs, input_ids.shape[1], stopping.longest)
        ):
            others = logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
            return super()._sample(input_ids, *others, **model_kwargs)
        outputs = self._prefill(input_ids, generation_config, model_kwargs)
        model_kwargs = self._update_model_kwargs_for_generation(outputs, model_kwargs)
        cache: DecoderCache = model_kwargs[CACHE]
        with_next = torch.cat([input_ids, input_ids[:, -1:]], 1).long()  # any token
        given = self.prepare_inputs_for_generation(with_next, next_sequence_length=1, **model_kwargs)
        names = ("input_ids", "attention_mask", "position_ids")
        tokens, mask, positions = (given.pop(name, None) for name in names)
        inputs, mask = self._inputs_of(tokens, mask, positions, cache, given)
        pad = int(generation_config._pad_token_tensor) if stopping.pads else None
        records = generation_config.return_dict_in_generate and (
            generation_config.output_scores or generation_config.output_logits
        )
        choice = Choice(processors, generation_config.do_sample, stopping.ends, pad, bool(records))
        step, self._step = self._step, None
        with torch.cuda.device_of(outputs.logits):  # streams, events and graphs belong to the current GPU
            if step is None or not step.supports(self.runner, inputs, cache, choice):
                step = Step(self.runner, inputs, mask, cache, choice, outputs.logits.shape[-1])
            step.begin(inputs, mask, input_ids, choice.ignored)
            longest = stopping.longest
            result = choose_tokens(step, outputs.logits, input_ids, longest, stopping, generation_config, streamer)
        returns_cache = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        step.cache_is_free = not returns_cache
        if step.is_captured:
            self._step = step
        return result

    def _covers(self, config: Any, model_kwargs: Mapping[str, Any], length: int, longest: int) -> bool:
        """Return True where a step computes what transformers' loop does for prompts of a length."""
        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        return (
            isinstance(cache, DecoderCache)
            and all(layer.is_croppable for layer in cache.layers)
            and (mask is None or mask.shape[1] == length)  # the prompts include the tokens in the cache
            and length + 2 <= longest <= cache.slots + 1
            and all(longest <= positions + 1 for positions in self.positions.values())  # no step checks them
            and not self.config.is_encoder_decoder
            and not (config.is_assistant or config.output_attentions or config.output_hidden_states)
            and not torch.distributed.is_initialized()
        )

    def _optimize_model_for_decode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _supports_logits_to_keep(self) -> bool:
        return True

    def can_generate(self) -> bool:
        """Return True, which pipelines of transformers ask for.

        Returns:
            True.
        """
        return True

    def is_remote_code(self) -> bool:
        """Return False: the code of the model is part of pt2mx.

        Returns:
            False.
        """
        return False
