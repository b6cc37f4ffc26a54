"""The cache of a decoder: keys and values of each layer, of a fixed number of slots, as transformers asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from pt2mx.errors import MXError
from pt2mx.extras import import_extra

_cache_utils = import_extra("transformers.cache_utils", "hf")

#: a cache has a multiple of so many slots: few programs are compiled
_SLOTS = 256
#: (heads, width) of the keys and of the values of each layer
LayerShapes = list[tuple[tuple[int, int], tuple[int, int]]]


class CacheLayer(_cache_utils.CacheLayerMixin):  # type: ignore[name-defined]
    """Keys and values of a layer, (B, heads, slots, width), the first `length` of which are taken: a number, or (1,)
    int64 inside a program."""

    is_compileable, is_sliding = False, False

    def __init__(self, keys: Tensor, values: Tensor, length: int | Tensor = 0) -> None:
        super().__init__()
        self.keys, self.values, self.length, self.is_initialized = keys, values, length, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to do: the tensors are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (B, heads, S, width) into the slots behind those that are taken. Gives all of them."""
        slots = self.length + torch.arange(key_states.shape[2], device=key_states.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int | Tensor:
        return self.length

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def reset(self) -> None:
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, of a number that is given as a negative one; of a positive one keep so many."""
        number = int(tokens_to_remove)
        self.length = min(self.length, number) if number > 0 else self.length + number

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows of a batch in another order, in place, as beam search does."""
        for tensor in (self.keys, self.values):
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


def empty_cache(shapes: LayerShapes, batch: int, slots: int, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' `Cache` over layers without a token."""

    def zeros(heads: int, width: int) -> Tensor:
        return torch.zeros(batch, heads, slots, width, device=device, dtype=dtype)

    return _cache_utils.Cache(layers=[CacheLayer(zeros(*keys), zeros(*values)) for keys, values in shapes])


def room_for(tokens: int) -> int:
    """The slots of a cache with room for so many tokens."""
    return -(-tokens // _SLOTS) * _SLOTS


def slots_of(cache: Any) -> int:
    """The slots that a cache has."""
    return cache.layers[0].get_max_length()


def grow(cache: Any, slots: int) -> None:
    """Give a cache more slots, in place."""
    for layer in cache.layers:
        more = (0, 0, 0, slots - layer.get_max_length())
        layer.keys, layer.values = (torch.nn.functional.pad(one, more) for one in (layer.keys, layer.values))


def cache_within(keys: list[Tensor], values: list[Tensor], start: Tensor) -> Any:
    """transformers' `Cache` over a program's inputs, in which `start` slots are taken."""
    return _cache_utils.Cache(layers=[CacheLayer(*pair, start) for pair in zip(keys, values, strict=True)])


def layer_shapes(model: Any) -> LayerShapes:
    """The shapes with which a causal language model fills an empty cache.

    Raises:
        MXError: for a layer that keeps something else than keys and values, as that of a recurrent model does.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = getattr(model(input_ids=tokens, use_cache=True), "past_key_values", None)
    found: LayerShapes = []
    for number, layer in enumerate(getattr(cache, "layers", [])):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not (_is_of_tokens(keys) and _is_of_tokens(values)):
            raise MXError(
                f"layer {number} of {type(model).__name__} keeps a {type(layer).__name__}, not keys and values of its "
                "tokens: only decoders with attention in all layers can be exported with their cache"
            )
        found.append((_heads_and_width(keys), _heads_and_width(values)))
    if not found:
        raise MXError(f"{type(model).__name__} keeps no cache: it is no causal language model")
    return found


def caches_of(program: ExportedProgram) -> tuple[LayerShapes, torch.device, torch.dtype]:
    """The shapes of the program's caches, and where and of what they are."""
    inputs = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    keys, values = ([inputs[n] for n in inputs if n.startswith(f"{kind}_")] for kind in ("keys", "values"))
    if not keys or len(keys) != len(values):
        raise MXError("the program has no inputs `keys` and `values`: it is no decoder with a cache")
    shapes = [((k.shape[1], k.shape[3]), (v.shape[1], v.shape[3])) for k, v in zip(keys, values, strict=True)]
    return shapes, keys[0].device, keys[0].dtype


def _is_of_tokens(held: object) -> bool:
    return isinstance(held, Tensor) and held.dim() == 4 and held.shape[2] == 2


def _heads_and_width(held: Any) -> tuple[int, int]:
    return held.shape[1], held.shape[3]
