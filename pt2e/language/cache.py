"""The cache of a decoder: keys and values of each layer, of a fixed number of slots, as transformers asks for them.

Keys are one tensor, (B, heads, slots, width), or, of a quantized cache, a list of two: codes and scales. Values too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.user_errors import WITHOUT_EXPORT

_cache_utils = import_extra("transformers.cache_utils", "hf")

#: a cache has a multiple of so many slots: few programs are compiled
_SLOTS = 256
_WITH_CACHE = (
    "only decoders with attention in all layers can be exported with their cache; give --output a name that ends in "
    f".pt2 for a program without a cache, or {WITHOUT_EXPORT}"
)
#: keys or values: a tensor, or codes and scales
Stored = Tensor | list[Tensor]
#: the keys and the values of each layer, as tensors without memory of one sequence and no slots
Layers = list[tuple[Stored, Stored]]


class CacheLayer(_cache_utils.CacheLayerMixin):  # type: ignore[name-defined]
    """Keys and values of a layer, the first `length` slots of which are taken: a number, or (1,) int64 inside a
    program."""

    is_compileable, is_sliding = False, False

    def __init__(self, keys: Stored, values: Stored, length: int | Tensor = 0) -> None:
        super().__init__()
        self.keys, self.values, self.length, self.is_initialized = keys, values, length, True

    @property
    def tensors(self) -> list[Tensor]:
        """All that is stored."""
        return pytree.tree_leaves((self.keys, self.values))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to do: the tensors are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (B, heads, S, width) into the slots behind those that are taken. Gives all of them. A program that
        stores codes does not get here: it was exported with tensors."""
        slots = self.length + torch.arange(key_states.shape[2], device=key_states.device)
        keys, values = self.tensors
        # of transposed ones Inductor (torch 2.13) cannot fuse the quantization to INT8, where the length is dynamic
        keys.index_copy_(2, slots, key_states.contiguous())
        values.index_copy_(2, slots, value_states.contiguous())
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int | Tensor:
        return self.length

    def get_max_length(self) -> int:
        return self.tensors[0].shape[2]

    def reset(self) -> None:
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, of a number that is given as a negative one; of a positive one keep so many."""
        number = int(tokens_to_remove)
        self.length = min(self.length, number) if number > 0 else self.length + number

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows of a batch in another order, in place, as beam search does."""
        for tensor in self.tensors:
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


def empty_cache(layers: Layers, batch: int, slots: int, device: torch.device) -> Any:
    """transformers' `Cache` over layers without a token."""

    def zeros(stored: Tensor) -> Tensor:
        return torch.zeros(batch, stored.shape[1], slots, stored.shape[3], device=device, dtype=stored.dtype)

    return _cache_utils.Cache(layers=[CacheLayer(*pytree.tree_map(zeros, layer)) for layer in layers])


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
        stored = layer.keys, layer.values
        layer.keys, layer.values = pytree.tree_map(lambda one, more=more: torch.nn.functional.pad(one, more), stored)


def cache_within(keys: list[Tensor], values: list[Tensor], start: Tensor) -> Any:
    """transformers' `Cache` over a program's inputs, in which `start` slots are taken."""
    return _cache_utils.Cache(layers=[CacheLayer(*pair, start) for pair in zip(keys, values, strict=True)])


def equal_extents(inputs: dict[str, Any]) -> list[list[tuple[Any, int]]]:
    """The inputs of a program, by name, and their dimensions that are the same: the batch, the length, the slots. A
    trace that does not know takes products of them to be different."""
    stored = pytree.tree_leaves((inputs["keys"], inputs["values"]))
    read, positions, mask = (inputs[name] for name in ("input_ids", "position_ids", "attention_mask"))
    batch = [(tensor, 0) for tensor in (read, positions, mask, *stored)]
    return [batch, [(read, 1), (positions, 1)], [(mask, 1), *((tensor, 2) for tensor in stored)]]


def layers_of(model: Any) -> Layers:
    """The keys and values with which a causal language model fills an empty cache.

    Raises:
        MXError: for a layer that keeps something else than keys and values, as that of a recurrent model does.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = getattr(model(input_ids=tokens, use_cache=True), "past_key_values", None)
    found: Layers = []
    for number, layer in enumerate(getattr(cache, "layers", [])):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not (_is_of_tokens(keys) and _is_of_tokens(values)):
            raise MXError(
                f"layer {number} of {type(model).__name__} keeps a {type(layer).__name__}, not keys and values of its "
                f"tokens: {_WITH_CACHE}"
            )
        found.append((_without_memory(keys), _without_memory(values)))
    if not found:
        raise MXError(f"{type(model).__name__} keeps no keys and values of its tokens: {_WITH_CACHE}")
    return found


def cache_of(program: ExportedProgram) -> tuple[Layers, torch.device, torch.dtype]:
    """The layers of the program's cache, the device that it is on, and the dtype of the program's logits."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    given = [values[name] for name in program.graph_signature.user_inputs]
    _, named = pytree.tree_unflatten(given, program.call_spec.in_spec)
    if not named.get("keys") or len(named["keys"]) != len(named.get("values", ())):
        raise MXError("the program has no inputs `keys` and `values`: it is no decoder with a cache")
    layers = [pytree.tree_map(_without_memory, pair) for pair in zip(named["keys"], named["values"], strict=True)]
    (logits,) = program.graph_signature.user_outputs
    dtype = next(node for node in program.graph.nodes if node.name == logits).meta["val"].dtype
    return layers, pytree.tree_leaves(named["keys"])[0].device, dtype


def _is_of_tokens(held: object) -> bool:
    return isinstance(held, Tensor) and held.dim() == 4 and held.shape[2] == 2


def _without_memory(held: Any) -> Tensor:
    return torch.empty(1, held.shape[1], 0, held.shape[3], dtype=held.dtype, device="meta")
