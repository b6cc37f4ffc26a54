"""A decoder of transformers as one program: tokens and a cache in, logits out, the cache written in place.

One program serves for prompts of any length and for single tokens, so that both share their weights.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.pt2e.language import attention
from pt2mx.pt2e.language.cache import Layers, cache_within, empty_cache, equal_extents, layers_of
from pt2mx.pt2e.user_errors import WITHOUT_EXPORT, one_line, quiet_export

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: of logits computed in another order, in 16 bits, over their norm
_AGREEMENT = 0.05
_SIZE = Dim.DYNAMIC
#: inputs of the program -> the dimensions that may have any size; of `keys` and `values` one tensor or two a layer
DYNAMIC: dict[str, dict[int, Any]] = {
    "input_ids": {0: _SIZE, 1: _SIZE},
    "position_ids": {0: _SIZE, 1: _SIZE},
    "attention_mask": {0: _SIZE, 1: _SIZE},
    "start": {},
    "logits_to_keep": {0: _SIZE},
    "keys": {0: _SIZE, 2: _SIZE},
    "values": {0: _SIZE, 2: _SIZE},
}


#: the same of inputs whose length is fixed
_OF_LENGTH: dict[str, dict[int, Any]] = {
    "input_ids": {0: _SIZE},
    "position_ids": {0: _SIZE},
    "logits_to_keep": {},
}

#: types of RoPE whose frequencies depend on the length of the text
_OF_THE_LENGTH = {"longrope", "dynamic"}
#: that the names of a decoder's tensors begin with in its program
PREFIX = "model."


class CachedDecoder(nn.Module):
    """A causal language model whose cache is an input."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._taken = inspect.signature(model.forward).parameters

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
        given = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        for same in equal_extents({**given, "keys": keys, "values": values}):
            for tensor, dim in same[1:]:
                torch._check(tensor.shape[dim] == same[0][0].shape[same[0][1]])
        optional = {"position_ids": position_ids, "logits_to_keep": logits_to_keep}
        logits = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache_within(keys, values, start),
            use_cache=True,
            **{name: value for name, value in optional.items() if name in self._taken},
        ).logits
        return logits if "logits_to_keep" in self._taken else logits[:, logits_to_keep]


def export_decoder(model: PreTrainedModel) -> ExportedProgram:
    """Export a causal language model of transformers with its cache, for batches, prompts and caches of any size.

    Raises:
        MXError: for a model that keeps anything but keys and values, and one that cannot be exported.
    """
    _check_rope(model)
    layers, usual = layers_of(model), model.config._attn_implementation
    example = inputs(layers, model.device)
    if usual == "sdpa":
        attention.register()
        model.set_attn_implementation(attention.NAME)
    try:
        with quiet_export():
            program = export(CachedDecoder(model), example)
    except Exception as error:
        text = f"{type(model).__name__} cannot be exported with its cache: {one_line(error)}"
        raise MXError(f"{text}; {WITHOUT_EXPORT}") from error
    finally:
        model.set_attn_implementation(usual)
    _check(model, program, layers)
    return program


def _check_rope(model: PreTrainedModel) -> None:
    """Raise an error for positions whose frequencies depend on the length of the text."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (parameters, *parameters.values()) if isinstance(one, dict)}
    if found := kinds & _OF_THE_LENGTH:
        raise MXError(
            f"{type(model).__name__} has RoPE of the type {found.pop()!r}: its frequencies depend on the length of the "
            f"text, and a program reads texts of any length; {WITHOUT_EXPORT}"
        )


@torch.no_grad()
def _check(model: PreTrainedModel, program: ExportedProgram, layers: Layers) -> None:
    """Raise an error for a model that takes its cache to be as long as what was read, or sees tokens to come."""
    prompt, length = 12, 16
    tokens = torch.arange(2 * length).reshape(2, length) % model.config.get_text_config().vocab_size
    call = inputs(layers, model.device, tokens)
    for name in ("keys", "values"):
        call[name] = [nn.functional.pad(one, (0, 0, 0, 5)) for one in call[name]]
    call["attention_mask"] = nn.functional.pad(call["attention_mask"], (0, 5), value=1)
    decoder, found = program.module(), []
    for first, last in ((0, prompt), *((i, i + 1) for i in range(prompt, length))):
        here = {name: call[name][:, first:last] for name in ("input_ids", "position_ids")}
        kept = torch.arange(last - first, device=model.device)
        start = torch.full((1,), first, device=model.device)
        found.append(decoder(**{**call, **here, "start": start, "logits_to_keep": kept}))
    wanted = model(input_ids=call["input_ids"], use_cache=False).logits.float()
    error = (torch.cat(found, 1).float() - wanted).norm() / wanted.norm()
    if not error < _AGREEMENT:
        raise MXError(
            f"{type(model).__name__} with a cache of fixed length gives other logits than without one ({error:.2g} of "
            f"their norm): its attention cannot be exported with its cache; {WITHOUT_EXPORT}"
        )


def export(decoder: nn.Module, example: dict[str, Any], length: int | None = None) -> ExportedProgram:
    """Export what takes a decoder's inputs: the float decoder, the converted one, or one that takes its weights too.

    Args:
        length: of the tokens, where it is to be fixed, and with it the number of logits; None: any.
    """
    dynamic = DYNAMIC if length is None else {**DYNAMIC, **_OF_LENGTH}
    shapes = {n: pytree.tree_map(lambda _, n=n: dynamic.get(n, {}), value) for n, value in example.items()}
    with torch.no_grad():
        return torch.export.export(decoder, (), example, dynamic_shapes=shapes, strict=False)


def inputs(
    layers: Layers, device: torch.device, tokens: Tensor | None = None, slots: int | None = None
) -> dict[str, Any]:
    """A decoder's inputs that read tokens, (B, S), without padding.

    Args:
        tokens: None: some for an export, for which no two extents may be equal.
        slots: of the cache; None: as many as tokens.
    """
    ids = torch.zeros(2, 3, dtype=torch.long) if tokens is None else tokens
    batch, length = ids.shape
    slots, kept = (length + 2, length - 1) if tokens is None else (slots or length, length)
    cache = empty_cache(layers, batch, slots, device)
    return {
        "input_ids": ids.to(device),
        "position_ids": torch.arange(length, device=device).repeat(batch, 1),
        "attention_mask": torch.ones(batch, slots, dtype=torch.long, device=device),
        "start": torch.zeros(1, dtype=torch.long, device=device),
        "logits_to_keep": torch.arange(length - kept, length, device=device),
        "keys": [layer.keys for layer in cache.layers],
        "values": [layer.values for layer in cache.layers],
    }
