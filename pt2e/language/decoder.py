"""Export a decoder of transformers as one program: tokens and a cache in, logits out, the cache written in place.

The same program reads prompts of any length and single tokens, so that both share their weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch import config
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.patches.model_functions import model_functions
from pt2mx.pt2e.files.user_errors import WITHOUT_EXPORT, one_line, quiet_export
from pt2mx.pt2e.language import attention, compression, recurrence
from pt2mx.pt2e.language.attention import with_attention
from pt2mx.pt2e.language.cache import (
    CACHE_NAMES,
    KINDS,
    SOURCE_MASK,
    CacheInProgram,
    Layers,
    cache_within,
    empty_cache,
    equal_dims,
)
from pt2mx.pt2e.language.decoder_check import AGREEMENT, AGREEMENT_OF_COPIES, distance, error_of
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.language.merge_images import FEATURES, POSITIONS, ROWS, ImageInputs, merged_images
from pt2mx.pt2e.language.repeated_layers import repeated_layers, traced_layers
from pt2mx.pt2e.language.rope import longest_text, with_frequencies_for
from pt2mx.pt2e.language.source import decoder_call
from pt2mx.pt2e.program.program import export_program

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: function or method in a module of transformers -> what takes its place, with the cache before its arguments
FUNCTIONS: dict[str, Callable[..., Any]] = {**attention.FUNCTIONS, **compression.FUNCTIONS, **recurrence.FUNCTIONS}

_SIZE = Dim.DYNAMIC
#: input of the program -> its dynamic dimensions; the inputs of the cache have one tensor or two per layer
DYNAMIC: dict[str, dict[int, Any]] = {
    "input_ids": {0: _SIZE, 1: _SIZE},
    "position_ids": {0: _SIZE, 1: _SIZE},
    "attention_mask": {0: _SIZE, 1: _SIZE},
    "start": {},
    "logits_to_keep": {0: _SIZE},
    "image_features": {0: _SIZE},
    "image_rows": {0: _SIZE, 1: _SIZE},
    "image_positions": {0: _SIZE, 2: _SIZE},
    SOURCE_MASK: {0: _SIZE, 1: _SIZE},
    **{name: {0: _SIZE} if size is None else {0: _SIZE, 2: _SIZE} for name, size in KINDS.items()},
}
#: the same for inputs of fixed length
_OF_LENGTH: dict[str, dict[int, Any]] = {
    "input_ids": {0: _SIZE},
    "position_ids": {0: _SIZE},
    "logits_to_keep": {},
    "image_rows": {0: _SIZE},
    "image_positions": {0: _SIZE},
}

#: the prefix of the names of a decoder's tensors in its program
PREFIX = "model."
#: the length of the encoder's result in an example, which is no other size of it
_SOURCE_LENGTH = 7


class CachedDecoder(nn.Module):
    """A language model whose cache is an input."""

    def __init__(self, model: PreTrainedModel, layers: Layers) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self._parameters_of_forward = inspect.signature(model.forward).parameters
        self._cache: CacheInProgram | None = None  # of the call that runs

    def cached(self, number: int) -> list[Tensor]:
        """Return the tensors of a layer in the cache of the call that runs."""
        return [] if self._cache is None else self._cache.layers[number].tensors

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        start: Tensor,
        logits_to_keep: Tensor,
        image_features: list[Tensor] | None = None,
        image_rows: Tensor | None = None,
        image_positions: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        keys: list[Tensor] | None = None,
        values: list[Tensor] | None = None,
        cross_keys: list[Tensor] | None = None,
        cross_values: list[Tensor] | None = None,
        compressed_keys: list[Tensor] | None = None,
        index_keys: list[Tensor] | None = None,
        conv_states: list[Tensor] | None = None,
        recurrent_states: list[Tensor] | None = None,
    ) -> Tensor:
        """Read S tokens of each of B sequences, and write the cache: keys and values into S slots, and states.

        Args:
            input_ids: (B, S) int64.
            position_ids: (B, S) int64, the number of each token in its sequence.
            attention_mask: (B, L) int64, zero where the cache holds padding.
            start: (1,) int64, the number of filled slots.
            logits_to_keep: (T,) int64, the columns of `input_ids` whose logits to return.
            image_features: (rows, hidden) each, for a model that reads images: rows 1 to N are the features of image
                tokens, which take the place of embeddings, and those that further layers add.
            image_rows: (B, S) int64, the row of each token; 0: a token of text.
            image_positions: (B, axes, S) int64, the positions of the tokens, where they have several axes.
            encoder_attention_mask: (B, source) int64, zero where the encoder's result is padding.
            keys, values: one tensor (B, heads, L, width) per layer with attention, changed in place; no values
                in layers that compress tokens, whose keys are their values.
            cross_keys, cross_values: one tensor (B, heads, source, width) per layer with cross attention.
            compressed_keys, index_keys: one tensor (B, 1, L, width) per layer that compresses tokens, or chooses among
                compressed ones, changed in place.
            conv_states: one tensor (B, channels, K) per layer that reads its last K inputs, as a convolution does,
                changed in place.
            recurrent_states: one tensor (B, ...) per layer with a recurrence, changed in place.

        Returns:
            (B, T, vocabulary) logits.
        """
        tokens = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        of_source, entries = (cross_keys, cross_values), (compressed_keys, index_keys)
        kinds = (keys, values, *of_source, *entries, conv_states, recurrent_states)
        stored = {name: tensors for name, tensors in zip(KINDS, kinds, strict=True) if tensors}
        of_images = {FEATURES: image_features, ROWS: image_rows, POSITIONS: image_positions}
        images = {name: value for name, value in of_images.items() if value is not None}
        for group in equal_dims({**tokens, **images, SOURCE_MASK: encoder_attention_mask, **stored}):
            first, first_dim = group[0]
            for tensor, dim in group[1:]:
                torch._check(tensor.shape[dim] == first.shape[first_dim])
        cache = cache_within(self.layers, stored, start, attention_mask, encoder_attention_mask)
        self._cache = cache
        if "keys" not in stored:  # without attention, the mask is that of the tokens
            tokens["attention_mask"] = cache.mask_of_tokens(input_ids.shape[1])
        past = cache if encoder_attention_mask is None else cache.with_cross_attention()
        given = decoder_call(self.model, tokens, encoder_attention_mask)
        given |= {**dict.fromkeys(CACHE_NAMES, past), "logits_to_keep": logits_to_keep}
        taken = self._parameters_of_forward
        call = {name: value for name, value in given.items() if name in taken}
        reads_images: AbstractContextManager[dict[str, Any]] = nullcontext({})
        if images:
            reads_images = merged_images(self.model, cache, input_ids, images)
        with model_functions(self.model, FUNCTIONS, cache), reads_images as of_images:
            logits = self.model(**{**call, **of_images}, use_cache=True).logits
        return logits if "logits_to_keep" in taken else logits[:, logits_to_keep]


def export_decoder(
    model: PreTrainedModel, length: int | None = None, images: ImageInputs | None = None
) -> ExportedProgram:
    """Export a causal language model of transformers with its cache, for batches, prompts and caches of any size.

    `length` is the length of `longest_text`; `images` are the image inputs, for a program that reads images."""
    length = longest_text(model, length)
    layers = layers_of(model)
    keeps_tokens_alone = all(layer.keys() <= {"keys", "values"} for layer in layers)
    with with_frequencies_for(model, length):
        if keeps_tokens_alone:  # other layers change the cache in Python, which no copy does
            with suppress(MXError):  # such as where torch takes the number of a layer, but no `LayerNumber`
                program, error = _checked_export(model, layers, images, repeated_layers)
                if error < (AGREEMENT_OF_COPIES if model.dtype == torch.float32 else AGREEMENT):
                    return program
        program, error = _checked_export(model, layers, images, traced_layers)
    if not error < AGREEMENT:
        raise MXError(
            f"{type(model).__name__} with a cache of fixed length gives other logits than with its own ({error:.2g} of "
            f"their norm): its attention cannot be exported with its cache; {WITHOUT_EXPORT}"
        )
    return program


def _checked_export(
    model: PreTrainedModel,
    layers: Layers,
    images: ImageInputs | None,
    copies: Callable[..., AbstractContextManager[list[str]]],
) -> tuple[ExportedProgram, float]:
    """Return the program of a model and its error."""
    try:
        decoder = CachedDecoder(model, layers)
        with with_attention(model), quiet_export(), copies(model, PREFIX, decoder.cached):
            program = export(decoder, inputs(layers, model.device, images=images))
        return program, error_of(model, program, layers, images)
    except Exception as error:
        text = f"{type(model).__name__} cannot be exported with its cache: {one_line(error)}"
        raise MXError(f"{text}; {WITHOUT_EXPORT}") from error


def relative_error(logits: Tensor, expected: Tensor) -> float | None:
    """Return the error of logits relative to their norm; None where it is one of rounding."""
    error = distance(logits, expected)
    return None if error < AGREEMENT else error


def export(decoder: nn.Module, example: dict[str, Any], length: int | None = None) -> ExportedProgram:
    """Export a float decoder, a converted one, or one that takes its weights as inputs.

    `length` fixes the number of tokens, and of logits; None: any number."""
    dynamic = DYNAMIC if length is None else {**DYNAMIC, **_OF_LENGTH}
    shapes = {}
    for name, value in example.items():
        leaves, spec = pytree.tree_flatten(value)
        shapes[name] = pytree.tree_unflatten([dynamic.get(name, {})] * len(leaves), spec)
    with shared_sizes(example):
        return export_program(decoder, (), example, shapes)


def inputs(
    layers: Layers,
    device: torch.device,
    tokens: Tensor | None = None,
    slots: int | None = None,
    images: ImageInputs | None = None,
) -> dict[str, Any]:
    """Return the inputs with which a decoder reads tokens, (B, S), without padding.

    Without tokens it is an example for an export, in which no two sizes are equal. The cache has as many slots as there
    are tokens, or `slots`."""
    first = 0  # of the columns whose logits are returned
    if tokens is None:
        tokens, slots, first = torch.zeros(2, 4, dtype=torch.long), 6, 1
    batch, length = tokens.shape
    slots = slots or length
    positions = torch.arange(length, device=device).repeat(batch, 1)
    return {
        "input_ids": tokens.to(device),
        "position_ids": positions,
        "attention_mask": torch.ones(batch, slots, dtype=torch.long, device=device),
        "start": torch.zeros(1, dtype=torch.long, device=device),
        "logits_to_keep": torch.arange(first, length, device=device),
        **({} if images is None else images.of_text(positions)),
        **empty_cache(layers, batch, slots, device, _SOURCE_LENGTH).inputs(),
    }


class TextInputs(Sequence[dict[str, Any]]):
    """The inputs with which a decoder reads texts, (B, S) tokens each.

    A text gets its cache when it is read: the caches of thousands of texts fill the memory."""

    def __init__(self, layers: Layers, device: torch.device, texts: Sequence[Tensor]) -> None:
        self.layers, self.device, self.texts = layers, device, texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        return inputs(self.layers, self.device, self.texts[index])


class _SharingShapeEnv(ShapeEnv):
    """A `ShapeEnv` that gives dynamic sizes one symbol where the example inputs have equal sizes."""

    def create_symbol(
        self,
        val: Any,
        source: Any,
        dynamic_dim: DimDynamic = DimDynamic.DUCK,
        constraint_dim: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dynamic_dim is DimDynamic.DYNAMIC and isinstance(val, int):
            dynamic_dim, constraint_dim = DimDynamic.DUCK, None
        return super().create_symbol(val, source, dynamic_dim, constraint_dim, *args, **kwargs)


@contextmanager
def shared_sizes(example: dict[str, Any]) -> Iterator[None]:
    """Export decoders with one symbol for each size, within the context.

    torch.export gives each dimension a symbol, and proves them equal. A decoder of 30 layers has 60 tensors of keys and
    values, each with a batch size and a number of slots: 120 symbols for two sizes, whose proofs took a quarter of the
    export.

    Args:
        example: the inputs of the decoder. If two sizes that may differ are equal here, each dimension gets a symbol.
    """
    groups = [*equal_dims(example), [(example["logits_to_keep"], 0)]]
    sizes = [size for (first, dim), *_ in groups if (size := first.shape[dim]) > 1]  # 1 has no symbol
    if len(set(sizes)) < len(sizes):
        yield
        return
    shapes = _SharingShapeEnv(tracked_fakes=[], trace_asserts=True)
    with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):  # as torch.export: an error instead of address 0
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, export=True)
    with tracing(TracingContext(mode)):
        yield
