"""Find the tensors that the layers of a decoder keep in its cache: of a model of transformers, or of a program."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import WITHOUT_EXPORT
from pt2mx.pt2e.language.cache import CACHE, KINDS, Layers, Stored, by_layer, cache_in
from pt2mx.pt2e.language.signature import example_inputs
from pt2mx.pt2e.language.source import decoder_call

_cache_utils = import_extra("transformers.cache_utils", "hf")

#: the class of layers that keep nothing, such as those that read the keys and values of another layer; transformers
#: before 5.24 has none
_NOTHING = getattr(_cache_utils, "DummyLayer", ())
#: entries of compressed tokens: tensor of a layer's cache -> its part in transformers' layer
_ENTRIES = {"compressed_keys": "compressor", "index_keys": "indexer"}
_WITH_CACHE = (
    "only decoders whose layers keep keys and values of their tokens, or the state of a recurrence, can be exported "
    f"with their cache; give --output a name that ends in .pt2 for a program without a cache, or {WITHOUT_EXPORT}"
)


def layers_of(model: Any) -> Layers:
    """Return the layers of the cache that a language model fills.

    Raises:
        MXError: for a layer that keeps anything but keys and values, entries of compressed tokens, and the state of a
            recurrence.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    if model.config.model_type == "recurrent_gemma":
        return _griffin_layers(model, tokens)
    with torch.no_grad():
        mask = torch.ones_like(tokens) if model.config.is_encoder_decoder else None
        output = model(**decoder_call(model, {"input_ids": tokens}, mask), use_cache=True)
    cache = cache_in(output)
    if not isinstance(cache, _cache_utils.EncoderDecoderCache):
        return _layers_in(model, cache)
    own, cross = (_layers_in(model, part) for part in (cache.self_attention_cache, cache.cross_attention_cache))
    pairs = zip(own, cross, strict=True)
    return [{**layer, **{f"cross_{name}": one for name, one in source.items()}} for layer, source in pairs]


def _layers_in(model: Any, cache: Any) -> Layers:
    """Return the layers of transformers' cache of two tokens."""
    layers: Layers = []
    for number, layer in enumerate(getattr(cache, "layers", [])):
        if (stored := _stored_in(layer)) is None:
            raise MXError(
                f"layer {number} of {type(model).__name__} keeps a {type(layer).__name__}, not keys and values of its "
                f"tokens: {_WITH_CACHE}"
            )
        layers.append(stored)
    if not any(layers):
        raise MXError(f"{type(model).__name__} keeps no keys and values of its tokens: {_WITH_CACHE}")
    return layers


@torch.no_grad()
def _griffin_layers(model: Any, tokens: Tensor) -> Layers:
    """Return the layers of RecurrentGemma, which returns no cache, and whose modules keep the states themselves."""
    config, cache = model.config, _cache_utils.DynamicCache(config=model.config)
    model(input_ids=tokens, use_cache=False, **{CACHE: cache})
    states: dict[str, Stored] = {
        "conv_states": torch.empty(1, config.lru_width, config.conv1d_width - 1, dtype=model.dtype, device="meta"),
        "recurrent_states": torch.empty(1, config.lru_width, device="meta"),
    }
    kinds = zip(config.layers_block_type, cache.layers, strict=True)
    recurrent = "recurrent", "linear_attention"  # the second from transformers 5.24 on
    return [states if kind in recurrent else _stored_in(layer) or {} for kind, layer in kinds]


def cache_of(program: ExportedProgram) -> tuple[Layers, torch.device, torch.dtype]:
    """Return the layers of a program's cache, its device, and the dtype of the program's logits."""
    named = example_inputs(program)
    kinds = [name for name in KINDS if named.get(name)]
    pairs = len(named.get("keys", ())) == len(named.get("values", ()))
    if not kinds or not (pairs or "compressed_keys" in kinds):
        raise MXError("the program has no inputs `keys` and `values`: it is no decoder with a cache")
    on_meta = {name: [pytree.tree_map(partial(_on_meta, name), one) for one in named[name]] for name in kinds}
    (logits,) = program.graph_signature.user_outputs
    dtype = next(node for node in program.graph.nodes if node.name == logits).meta["val"].dtype
    return by_layer(on_meta), pytree.tree_leaves(named[kinds[0]])[0].device, dtype


def _stored_in(layer: Any) -> dict[str, Stored] | None:
    """Return what a layer of transformers' cache keeps, as meta tensors; None where that is of no known kind."""
    if isinstance(layer, _NOTHING):
        return {}
    if hasattr(layer, "compressed_kv"):
        return _compressed_in(layer)
    if hasattr(layer, "update_indexer"):  # it keeps the keys of an indexer, too, which chooses a fixed number of tokens
        return None
    recurrent = isinstance(layer, _cache_utils.LinearAttentionCacheLayerMixin)
    stored = {name: getattr(layer, name, None) for name in KINDS}
    if recurrent:
        if layer.number_of_states != 1:
            return None
        stored |= {"conv_states": layer.conv_states[0], "recurrent_states": layer.recurrent_states[0]}
    tensors = {name: tensor for name, tensor in stored.items() if tensor is not None}
    slots = [tensor for name, tensor in tensors.items() if KINDS[name] is not None]
    of_tokens = [isinstance(one, Tensor) and one.dim() == 4 and one.shape[2] == 2 for one in slots]
    if not all(of_tokens) or (len(of_tokens) != 2 and not (recurrent and not of_tokens)):
        return None
    return {name: _on_meta(name, tensor) for name, tensor in tensors.items()}


def _compressed_in(layer: Any) -> dict[str, Stored]:
    """Return what a layer keeps that compresses windows of its tokens, and whose keys are its values."""
    entries = {name: layer.compressed_kv[part] for name, part in _ENTRIES.items() if part in layer.compressed_kv}
    tokens = [*layer.buffer_kv.values(), *layer.buffer_gate.values()]
    vectors = layer.buffer_kv["compressor"].shape[-1] // entries["compressed_keys"].shape[-1]  # of a token
    # an entry is made of as many windows, and the last token is among those read
    channels, length = sum(one.shape[-1] for one in tokens), vectors * layer.compress_rate - 1
    stored = {"keys": layer.keys, **{name: one.unsqueeze(1) for name, one in entries.items()}}
    state = torch.empty(1, channels, length, dtype=tokens[0].dtype, device="meta")
    return {**{name: _on_meta(name, one) for name, one in stored.items()}, "conv_states": state}


def _on_meta(name: str, stored: Any) -> Tensor:
    sizes = stored.shape[1:] if KINDS[name] is None else (stored.shape[1], 0, stored.shape[3])
    return torch.empty(1, *sizes, dtype=stored.dtype, device="meta")
