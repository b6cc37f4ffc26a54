"""The cache of a decoder: named tensors of each layer, in transformers' classes.

Keys and values have a fixed number of slots, one a token: (B, heads, slots, width). In a quantized cache they are lists
of two tensors, codes and scales. Recurrent layers have states whose size does not depend on the number of tokens: the
last inputs of a convolution, and the state of a recurrence. A hybrid model has both kinds. Layers that compress their
tokens keep the entries of windows, in as many slots as there are for tokens, and their keys are their values. Layers
that read the keys and values of other layers keep nothing. The decoder of an encoder-decoder also has the keys and
values of its cross attention, which the encoder's program computes once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.language.repeated_layers import LayerNumber

_cache_utils = import_extra("transformers.cache_utils", "hf")
_outputs = import_extra("transformers.modeling_outputs", "hf")

#: names of the cache in the arguments and outputs of models, the newest first: `cache` since transformers 5.24; before,
#: `past_key_values`, and `cache_params` in models without attention
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_FIELDS = [field.name for field in fields(_outputs.CausalLMOutputWithPast)]
#: the name in the installed version of transformers, of models with attention and of `generate`
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"
#: the slots of a cache are a multiple of this, so that few programs are compiled
_SLOTS = 256
#: sizes of dimension 2: the slots of the decoder's tokens, and the length of the encoder's result
SLOTS, SOURCE = "slots", "source"
#: tensor of a layer's cache, and input of the program -> the size of dimension 2; None where it is fixed
KINDS = {
    "keys": SLOTS,
    "values": SLOTS,
    "cross_keys": SOURCE,
    "cross_values": SOURCE,
    "compressed_keys": SLOTS,
    "index_keys": SLOTS,
    "conv_states": None,
    "recurrent_states": None,
}
#: input of the program: (B, source) int64, zero where the encoder's result is padding
SOURCE_MASK = "encoder_attention_mask"
#: input of the program that has a value for each token of a sequence -> the dimension of the tokens
OF_TOKENS = {"input_ids": 1, "position_ids": 1, "image_rows": 1, "image_positions": 2}
#: a tensor of the cache, or its codes and scales
Stored = Tensor | list[Tensor]
#: the tensors of each layer by kind; for a cache of any size, meta tensors of one sequence and no slots
Layers = list[dict[str, Stored]]


class CacheLayer(_cache_utils.CacheLayerMixin, _cache_utils.LinearAttentionCacheLayerMixin):  # type: ignore[name-defined]
    """The tensors of a layer. The first `length` slots are filled: a number, or (1,) int64 inside a program."""

    is_compileable, is_sliding, is_initialized, record_past = False, False, True, False
    keys = property(lambda self: self.stored.get("keys"))
    values = property(lambda self: self.stored.get("values"))
    # transformers numbers the states of a layer
    conv_states = property(lambda self: {0: self.stored.get("conv_states")})
    recurrent_states = property(lambda self: {0: self.stored.get("recurrent_states")})
    # the states of an empty cache are zeros, which is where each recurrence begins
    has_previous_state = property(lambda self: {0: True})

    def __init__(self, stored: dict[str, Stored], length: int | Tensor = 0) -> None:
        self.stored, self.length = stored, length

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer."""
        return pytree.tree_leaves(self.stored)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the tensors exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (B, heads, S, width) into the next slots, and return all slots; the keys twice where they are values.

        A program with a quantized cache does not call this: it was exported with tensors."""
        slots = self.length + torch.arange(key_states.shape[2], device=key_states.device)
        # Inductor (torch 2.13) cannot fuse the INT8 quantization of transposed tensors of dynamic length
        self.keys.index_copy_(2, slots, key_states.contiguous())
        if self.values is None:
            return self.keys, self.keys
        self.values.index_copy_(2, slots, value_states.contiguous())
        return self.keys, self.values

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Return the last inputs of a convolution, (B, channels, K), followed by S new ones, and keep the last K."""
        state = self.conv_states[state_idx]
        inputs = torch.cat([state, conv_states.to(state.dtype)], -1)
        state.copy_(inputs[..., -state.shape[-1] :])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Overwrite the state of a recurrence, and return it."""
        return self.recurrent_states[state_idx].copy_(recurrent_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int | Tensor:
        return self.length

    def get_max_length(self) -> int:
        """Return the number of slots; -1 without slots."""
        return pytree.tree_leaves(self.keys)[0].shape[2] if "keys" in self.stored else -1

    def reset(self) -> None:
        self.length = 0
        for name, stored in self.stored.items():
            if not KINDS[name]:
                pytree.tree_map(torch.zero_, stored)

    @property
    def is_croppable(self) -> bool:
        return all(KINDS[name] for name in self.stored)

    def crop(self, tokens_to_remove: int) -> None:
        """Keep this number of tokens, or for a negative number drop that many of the last."""
        if not self.is_croppable:
            raise MXError("the state of a recurrent layer cannot drop tokens: read the text again with a new cache")
        number = int(tokens_to_remove)
        self.length = min(self.length, number) if number > 0 else self.length + number

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch in place, for beam search."""
        for tensor in self.tensors:
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


class SlotCache(_cache_utils.Cache):  # type: ignore[name-defined]
    """A cache of layers in which `slots` tokens fit."""

    def __init__(self, layers: list[CacheLayer], slots: int) -> None:
        super().__init__(layers=layers)
        self.slots = slots

    @property
    def length(self) -> Any:
        """The number of filled slots."""
        return self.layers[0].length

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.slots

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.slots, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True, as each layer does."""
        return True


class CacheInProgram(SlotCache):
    """The cache that a model of transformers reads and writes while it is exported: its layers are the model's.

    Args:
        layers: the layers of the model, over the inputs of the program.
        mask: (B, slots) int64, zero at padding.
        source_mask: of an encoder-decoder the input `SOURCE_MASK`.
    """

    def __init__(self, layers: list[CacheLayer], mask: Tensor, source_mask: Tensor | None) -> None:
        super().__init__(layers, mask.shape[1])
        self.mask, self.source_mask = mask, source_mask
        self.latest: CacheLayer | None = None  #: the layer whose convolution ran last

    def mask_of_tokens(self, number: int) -> Tensor:
        """Return the columns of the mask for the next tokens."""
        return self.mask.index_select(1, self.length + torch.arange(number, device=self.mask.device))

    def with_cross_attention(self) -> Any:
        """Return transformers' cache of an encoder-decoder, whose keys and values of cross attention are computed."""
        cross = []
        for layer in self.layers:
            stored = {"keys": layer.stored["cross_keys"], "values": layer.stored["cross_values"]}
            cross.append(CacheLayer(stored, 1))  # filled: 1 is any number
        return _cache_utils.EncoderDecoderCache(self, SlotCache(cross, self.slots))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states, value_states, LayerNumber.plain(layer_idx), *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.latest = self.layers[layer_idx]
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)


class DecoderCache(SlotCache):
    """The cache of a decoder's program, between its calls.

    The program alone knows its layers: the tensors of each kind are in the order of the layers that have them."""

    def __init__(self, layers: list[CacheLayer], slots: int, source_mask: Tensor | None) -> None:
        super().__init__(layers, slots)
        #: True: a call for more tokens than fit adds slots
        self.grows = False
        #: of an encoder-decoder: the input `SOURCE_MASK`
        self.source_mask = source_mask
        #: after images, by how much the positions of the tokens of each sequence differ from their numbers, (B,)
        self.shift: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return len(self.layers[0].tensors[0])

    def reset(self) -> None:
        super().reset()
        self.shift = None

    def advance(self, tokens: int) -> None:
        """Count tokens that were written."""
        for layer in self.layers:
            layer.length += tokens

    def grow(self, slots: int) -> None:
        """Add slots up to a number."""
        more = (0, 0, 0, slots - self.slots)
        for layer in self.layers:
            for name, stored in layer.stored.items():
                if KINDS[name] == SLOTS:
                    layer.stored[name] = pytree.tree_map(lambda tensor: nn.functional.pad(tensor, more), stored)
        self.slots = slots

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the program that are the cache."""
        inputs: dict[str, Any] = {} if self.source_mask is None else {SOURCE_MASK: self.source_mask}
        for name in KINDS:
            tensors = [layer.stored[name] for layer in self.layers if name in layer.stored]
            if tensors:
                inputs[name] = tensors
        return inputs

    def set_source(self, results: Mapping[str, Any]) -> None:
        """Set the results of the encoder by input of the program: mask, keys and values of cross attention."""
        batch, sequences = self.batch_size, len(results["cross_keys"][0])
        if batch % sequences:
            raise MXError(f"the source holds {sequences} sequences, the tokens {batch}: give as many of both")

        # beam search repeats the tensors of the results, such as the mask, but not those in lists
        self.source_mask = _repeated(results[SOURCE_MASK], batch)
        for name in ("cross_keys", "cross_values"):
            for layer, tensor in zip(self.layers, results[name], strict=True):
                layer.stored[name] = _repeated(tensor, batch)

    def as_encoder_decoder_cache(self) -> Any:
        """Return transformers' `EncoderDecoderCache` of the filled slots; None for a cache of codes and scales."""
        layers = []
        for layer in self.layers:
            tensors = layer.stored
            if not isinstance(tensors["keys"], Tensor) or not isinstance(tensors["values"], Tensor):
                return None
            keys, values = tensors["keys"][:, :, : self.length], tensors["values"][:, :, : self.length]
            layers.append((keys, values, tensors["cross_keys"], tensors["cross_values"]))
        return _cache_utils.EncoderDecoderCache(layers)


def _repeated(tensor: Tensor, batch: int) -> Tensor:
    """Return a tensor whose rows are repeated, each next to itself, to `batch` rows."""
    return tensor.repeat_interleave(batch // len(tensor), 0)


def cache_in(output: Any) -> Any:
    """Return the cache in the output of a model, None if there is none."""
    for name in CACHE_NAMES:
        if name in output:
            return output[name]
    return None


def by_layer(inputs: Mapping[str, Any]) -> Layers:
    """Return the tensors of a program's inputs by their number among those of their kind."""
    layers: Layers = []
    for name in KINDS:
        for number, tensor in enumerate(inputs.get(name, ())):
            if number == len(layers):
                layers.append({})
            layers[number][name] = tensor
    return layers


def empty_cache(layers: Layers, batch: int, slots: int, device: torch.device, source: int = 0) -> DecoderCache:
    """Return a cache of empty layers; `source` is the length of the encoder's result."""
    lengths = {SLOTS: slots, SOURCE: source}

    def zeros(size: str | None, stored: Tensor) -> Tensor:
        sizes = stored.shape[1:] if size is None else (stored.shape[1], lengths[size], stored.shape[3])
        return torch.zeros(batch, *sizes, device=device, dtype=stored.dtype)

    empty: list[CacheLayer] = []
    for layer in layers:
        if layer:
            empty.append(CacheLayer({k: pytree.tree_map(partial(zeros, KINDS[k]), v) for k, v in layer.items()}))
    mask = torch.ones(batch, source, dtype=torch.long, device=device) if has_source(layers) else None
    return DecoderCache(empty, slots, mask)


def has_source(layers: Layers) -> bool:
    """Return True for the cache of an encoder-decoder."""
    return any("cross_keys" in layer for layer in layers)


def room_for(tokens: int) -> int:
    """Return the slots of a cache for this many tokens."""
    return -(-tokens // _SLOTS) * _SLOTS


def cache_within(
    layers: Layers, inputs: Mapping[str, Any], start: Tensor, mask: Tensor, source_mask: Tensor | None = None
) -> CacheInProgram:
    """Return a cache over the inputs of a program, with `start` filled slots; `layers` are those of the model."""
    of_kind = {name: iter(tensors) for name, tensors in inputs.items()}
    own = [CacheLayer({name: next(of_kind[name]) for name in layer}, start) for layer in layers]
    return CacheInProgram(own, mask, source_mask)


def equal_dims(inputs: dict[str, Any]) -> list[list[tuple[Any, int]]]:
    """Return groups of dimensions of a program's inputs that are equal: the batch, the length, the slots, the source.

    Without these groups a trace assumes that products of these sizes differ."""
    batch: list[tuple[Any, int]] = []
    groups: dict[str, list[tuple[Any, int]]] = {"tokens": [], SLOTS: [], SOURCE: [], "features": []}

    def add(tensor: Any, size: str | None, dim: int) -> None:
        batch.append((tensor, 0))
        if size is not None:
            groups[size].append((tensor, dim))

    for name, dim in OF_TOKENS.items():
        if inputs.get(name) is not None:
            add(inputs[name], "tokens", dim)
    add(inputs["attention_mask"], SLOTS, 1)
    if inputs.get(SOURCE_MASK) is not None:
        add(inputs[SOURCE_MASK], SOURCE, 1)
    for name, size in KINDS.items():
        for tensor in pytree.tree_leaves(inputs.get(name, [])):
            add(tensor, size, 2)
    for features in inputs.get("image_features") or ():
        groups["features"].append((features, 0))
    return [group for group in (batch, *groups.values()) if group]
