"""Compare the program of a decoder with its model: with padding, free slots, and texts longer than its windows.

To read a text that is longer than a window of thousands of tokens takes long. Instead of the beginning of such a text,
the check puts the same keys and values into both caches, and reads a few tokens after it. Entries of compressed tokens
follow from the tokens, so it reads the whole text for those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.extras import import_extra
from pt2mx.pt2e.language.cache import CACHE, OF_TOKENS, Layers, empty_cache, has_source
from pt2mx.pt2e.language.merge_images import ImageInputs
from pt2mx.pt2e.language.source import SourceEncoder, decoder_call, decoder_inputs, encoder_results, example_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_cache_utils = import_extra("transformers.cache_utils", "hf")

#: allowed error of logits in 16 bits, computed in another order, relative to their norm
AGREEMENT = 0.05
#: the same in float32, for a program with copied layers
AGREEMENT_OF_COPIES = 1e-3
#: tokens that the program reads: at once, and in all; the others one by one
_PROMPT, _LENGTH = 12, 16
#: the first token that it reads: those before are special in many vocabularies, and models answer them inexactly in
#: 16 bits (SmolLM2-135M with an error of .06 for tokens 0 to 15, of .005 for 16 and more)
_SPECIAL = 32
#: padding before the second text
_PADDING = 3
#: slots that stay free, and tokens of a long text on either side of the edge of a window
_MARGIN = 64
#: the longest window that the check exceeds, which bounds its memory
_LONGEST_WINDOW = 16384
#: parts of the names of fields that hold the length of a window, and ends of those that count layers
_NAMES, _COUNTS = ("window", "chunk_size", "local_attention"), ("layers", "pattern")


def distance(logits: Tensor, expected: Tensor) -> float:
    """Return the error of logits relative to the norm of the expected ones."""
    norm = expected.float().norm().clamp(min=torch.finfo(torch.float32).tiny)  # logits may be zero
    return float((logits.float() - expected.float()).norm() / norm)


def _errors(logits: Tensor, expected: Tensor) -> Iterator[float]:
    """Yield the errors of the logits of a text, (1, S, vocabulary): of the prompt and of single tokens.

    In 16 bits it is the lower quartile of the tokens: rounding in another order changes the experts of some of them."""
    steps = _LENGTH - _PROMPT
    for part in (slice(None, -steps), slice(-steps, None)):
        own, other = logits[0, part], expected[0, part]
        if logits.dtype == torch.float32:
            yield distance(own, other)
        else:
            of_tokens = torch.tensor([distance(*pair) for pair in zip(own, other, strict=True)])
            yield float(of_tokens.quantile(0.25, interpolation="lower"))


def windows_of(config: Any) -> list[int]:
    """Return the windows in a configuration of transformers that a text can exceed, the shortest first."""
    fields = {name: value for name, value in vars(config).items() if any(part in name for part in _NAMES)}
    fields = {name: value for name, value in fields.items() if not name.endswith(_COUNTS)}
    numbers = {value for value in pytree.tree_leaves(fields) if type(value) is int and value > 0}
    longest = getattr(config, "max_position_embeddings", None) or _LONGEST_WINDOW
    return sorted(n for n in numbers if n <= _LONGEST_WINDOW and n + min(n, _MARGIN) + _LENGTH <= longest)


@torch.no_grad()
def error_of(model: PreTrainedModel, program: ExportedProgram, layers: Layers, images: ImageInputs | None) -> float:
    """Return the largest error of the program's logits in short and long texts, relative to those of the model.

    The program reads two texts at once, the second one padded; the model reads each alone, with its own cache. The
    error is large for a model that assumes a cache as long as the tokens read, or sees other tokens than its own cache
    lets it see: later ones, padding, or those before a window."""
    decode = program.module(check_guards=False)
    source: dict[str, Any] = {}
    encoded: list[Any] = []  # the mask and the result of the encoder
    if has_source(layers):
        output = encoder_results(SourceEncoder(model)(**example_source(model)))
        source, encoded = decoder_inputs(output), [output.attention_mask, output.last_hidden_state]
    errors: list[float] = []
    reads_all = any("compressed_keys" in layer for layer in layers)
    for window in [0, *windows_of(model.config.get_text_config(decoder=True))]:
        margin = min(window, _MARGIN)
        past, padding = window + margin, 0 if source else _PADDING  # encoder-decoders count padding as tokens
        past, length = (0, past + _LENGTH) if reads_all else (past, _LENGTH)
        call = {**_call(model, layers, images, past, length, padding), **source}
        if past:
            _fill(call, window, margin)
        logits = torch.cat(list(_logits(decode, call, past)), 1)
        for row, first in enumerate((0, padding)):
            of_row = slice(row, row + 1)
            tokens = {"input_ids": call["input_ids"][of_row, max(first - past, 0) :]}
            given = decoder_call(model, tokens, *([one[of_row] for one in encoded] or [None]))
            if past:
                given[CACHE] = _own_cache(model, layers, call, of_row, slice(first, past))
            expected = model(**given, use_cache=False).logits
            errors += _errors(logits[of_row, -expected.shape[1] :], expected)
    return float(torch.tensor(errors).max())  # NaN if one is


def _call(
    model: PreTrainedModel, layers: Layers, images: ImageInputs | None, past: int, length: int, padding: int
) -> dict[str, Any]:
    """Return the inputs of the program for `length` tokens of two texts after a past, the second one padded."""
    config, device = model.config.get_text_config(decoder=True), model.device
    ids = (torch.arange(2 * length, device=device).reshape(2, length) + _SPECIAL) % config.vocab_size
    if (pad := getattr(config, "pad_token_id", None)) is not None:  # from which M2M100 computes positions
        ids[:, -_LENGTH] = pad
    slots = past + length + _MARGIN
    mask = torch.ones(2, slots, dtype=torch.long, device=device)
    mask[1, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past : past + length]
    of_images = {} if images is None else images.of_text(positions)
    cache = empty_cache(layers, 2, slots, device).inputs()
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask, **of_images, **cache}


def _fill(call: dict[str, Any], window: int, margin: int) -> None:
    """Write a past into the program's cache in place.

    All keys are zero, so that a token sees all of its past to the same degree. The values near the edge of the window
    are random, and so large that each of them changes the mean of what a token sees."""
    generator = torch.Generator().manual_seed(0)
    for values in call.get("values", []):
        near = values[:, :, : 2 * margin]
        near.copy_(torch.randn(near.shape, generator=generator) * (window / margin**0.5))


def _own_cache(model: PreTrainedModel, layers: Layers, call: dict[str, Any], row: slice, slots: slice) -> Any:
    """Return transformers' own cache with the keys and values of a row and slots of the program's."""
    own = _cache_utils.DynamicCache(config=model.config.get_text_config(decoder=True))
    numbers = (number for number, layer in enumerate(layers) if "keys" in layer)
    for number, *pair in zip(numbers, call.get("keys", []), call.get("values", []), strict=True):
        own.update(*(one[row, :, slots].clone() for one in pair), number)
    return _cache_utils.EncoderDecoderCache(own, _cache_utils.DynamicCache()) if has_source(layers) else own


def _logits(decode: Any, call: dict[str, Any], past: int) -> Iterator[Tensor]:
    """Yield the program's logits of a prompt, then of single tokens."""
    length = call["input_ids"].shape[1]
    prompt = length - _LENGTH + _PROMPT
    for first, last in ((0, prompt), *((i, i + 1) for i in range(prompt, length))):
        tokens = {name: call[name][..., first:last] for name in OF_TOKENS if name in call}
        device = call["input_ids"].device
        start, kept = torch.full((1,), past + first, device=device), torch.arange(last - first, device=device)
        yield decode(**{**call, **tokens, "start": start, "logits_to_keep": kept})
