"""The cache of a decoder: keys and values in a fixed number of slots, in transformers' classes; and attention over it.

The keys of a layer are one tensor, (B, heads, slots, width); in a quantized cache they are a list of two, codes and
scales. Values are stored in the same way.

Transformers' own mask and attention need three changes. A program of any length needs the mask even where it hides
nothing. Keys must not be copied for each query head. A row of padding, which sees nothing, must not become 0/0 in the
softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.user_errors import WITHOUT_EXPORT

_cache_utils = import_extra("transformers.cache_utils", "hf")

#: the slots of a cache are a multiple of this, so that few programs are compiled
_SLOTS = 256
_WITH_CACHE = (
    "only decoders with attention in all layers can be exported with their cache; give --output a name that ends in "
    f".pt2 for a program without a cache, or {WITHOUT_EXPORT}"
)
#: keys or values: a tensor, or codes and scales
Stored = Tensor | list[Tensor]
#: the keys and values of each layer, as meta tensors of one sequence and no slots
Layers = list[tuple[Stored, Stored]]


class CacheLayer(_cache_utils.CacheLayerMixin):  # type: ignore[name-defined]
    """Keys and values of a layer. The first `length` slots are filled: a number, or (1,) int64 inside a program."""

    is_compileable, is_sliding = False, False

    def __init__(self, keys: Stored, values: Stored, length: int | Tensor = 0) -> None:
        super().__init__()
        self.keys, self.values, self.length, self.is_initialized = keys, values, length, True

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer."""
        return pytree.tree_leaves((self.keys, self.values))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the tensors exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (B, heads, S, width) into the next slots, and return all slots.

        A program with a quantized cache does not call this: it was exported with tensors."""
        slots = self.length + torch.arange(key_states.shape[2], device=key_states.device)
        keys, values = self.tensors
        # Inductor (torch 2.13) cannot fuse the INT8 quantization of transposed tensors of dynamic length
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
        """Keep this number of tokens, or for a negative number drop that many of the last."""
        number = int(tokens_to_remove)
        self.length = min(self.length, number) if number > 0 else self.length + number

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch in place, for beam search."""
        for tensor in self.tensors:
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


def empty_cache(layers: Layers, batch: int, slots: int, device: torch.device) -> Any:
    """Return transformers' `Cache` over empty layers."""

    def zeros(stored: Tensor) -> Tensor:
        return torch.zeros(batch, stored.shape[1], slots, stored.shape[3], device=device, dtype=stored.dtype)

    return _cache_utils.Cache(layers=[CacheLayer(*pytree.tree_map(zeros, layer)) for layer in layers])


def room_for(tokens: int) -> int:
    """Return the slots of a cache for this many tokens."""
    return -(-tokens // _SLOTS) * _SLOTS


def slots_of(cache: Any) -> int:
    """Return the number of slots of a cache."""
    return cache.layers[0].get_max_length()


def grow(cache: Any, slots: int) -> None:
    """Add slots to a cache in place."""
    for layer in cache.layers:
        more = (0, 0, 0, slots - layer.get_max_length())
        stored = layer.keys, layer.values
        layer.keys, layer.values = pytree.tree_map(lambda one, more=more: torch.nn.functional.pad(one, more), stored)


def cache_within(keys: list[Tensor], values: list[Tensor], start: Tensor) -> Any:
    """Return transformers' `Cache` over the inputs of a program, with `start` filled slots."""
    return _cache_utils.Cache(layers=[CacheLayer(*pair, start) for pair in zip(keys, values, strict=True)])


def equal_dims(inputs: dict[str, Any]) -> list[list[tuple[Any, int]]]:
    """Return groups of dimensions of a program's inputs that are equal: the batch, the length, the slots.

    Without these groups a trace assumes that products of these sizes differ."""
    stored = pytree.tree_leaves((inputs["keys"], inputs["values"]))
    tokens, positions, mask = (inputs[name] for name in ("input_ids", "position_ids", "attention_mask"))
    batch = [(tensor, 0) for tensor in (tokens, positions, mask, *stored)]
    return [batch, [(tokens, 1), (positions, 1)], [(mask, 1), *((tensor, 2) for tensor in stored)]]


def layers_of(model: Any) -> Layers:
    """Return the layers of the cache that a causal language model fills.

    Raises:
        MXError: for a layer that keeps anything but keys and values, such as a recurrent one.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = getattr(model(input_ids=tokens, use_cache=True), "past_key_values", None)
    layers: Layers = []
    for number, layer in enumerate(getattr(cache, "layers", [])):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not (_is_of_tokens(keys) and _is_of_tokens(values)):
            raise MXError(
                f"layer {number} of {type(model).__name__} keeps a {type(layer).__name__}, not keys and values of its "
                f"tokens: {_WITH_CACHE}"
            )
        layers.append((_on_meta(keys), _on_meta(values)))
    if not layers:
        raise MXError(f"{type(model).__name__} keeps no keys and values of its tokens: {_WITH_CACHE}")
    return layers


def cache_of(program: ExportedProgram) -> tuple[Layers, torch.device, torch.dtype]:
    """Return the layers of a program's cache, its device, and the dtype of the program's logits."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    inputs = [values[name] for name in program.graph_signature.user_inputs]
    _, named = pytree.tree_unflatten(inputs, program.call_spec.in_spec)
    if not named.get("keys") or len(named["keys"]) != len(named.get("values", ())):
        raise MXError("the program has no inputs `keys` and `values`: it is no decoder with a cache")
    layers = [pytree.tree_map(_on_meta, pair) for pair in zip(named["keys"], named["values"], strict=True)]
    (logits,) = program.graph_signature.user_outputs
    dtype = next(node for node in program.graph.nodes if node.name == logits).meta["val"].dtype
    return layers, pytree.tree_leaves(named["keys"])[0].device, dtype


def _is_of_tokens(stored: object) -> bool:
    return isinstance(stored, Tensor) and stored.dim() == 4 and stored.shape[2] == 2


def _on_meta(stored: Any) -> Tensor:
    return torch.empty(1, stored.shape[1], 0, stored.shape[3], dtype=stored.dtype, device="meta")


#: the name of attention and mask for transformers, in `config._attn_implementation`
ATTENTION = "pt2mx"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of query (B, heads, S, D) over key, value (B, KV heads, L, D): (B, S, heads, D).

    The mask is (B, 1, S, L)."""
    grouped = query.shape[1] != key.shape[1]
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None


def mask_of(
    q_length: int, kv_length: int, q_offset: Tensor | int, kv_offset: int, device: torch.device, **kwargs: Any
) -> Tensor:
    """Return transformers' mask for `scaled_dot_product_attention`, (B, 1, S, L) booleans.

    It is never None, and each query sees its own key, also in padding."""
    masking = import_extra("transformers.masking_utils", "hf")
    sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    mask = masking.sdpa_mask(**sizes, device=device, **{**kwargs, **skips})
    queries = torch.arange(q_length, device=device) + q_offset
    return mask | (queries[:, None] == torch.arange(kv_length, device=device) + kv_offset)


def register_attention() -> None:
    """Register attention and mask with transformers."""
    functions: list[tuple[str, str, Callable[..., Any]]] = [
        ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", attend),
        ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS", mask_of),
    ]
    for module, name, function in functions:
        getattr(import_extra(module, "hf"), name).register(ATTENTION, function)
