"""Export the encoder of an encoder-decoder: its inputs in, the keys and values of the decoder's cross attention out.

The weights that compute these keys and values are part of this program. The decoder's program reads the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import WITHOUT_EXPORT, one_line, quiet_export
from pt2mx.pt2e.language.attention import with_attention
from pt2mx.pt2e.language.cache import CACHE, SOURCE_MASK, CacheLayer, SlotCache
from pt2mx.pt2e.program.program import export_program

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_cache_utils = import_extra("transformers.cache_utils", "hf")
_outputs = import_extra("transformers.modeling_outputs", "hf")

_SIZE = Dim.DYNAMIC
#: allowed error of the encoder's result in 16 bits, computed in another order, relative to its norm
_AGREEMENT = 0.05


@dataclass
class EncoderOutput(_outputs.BaseModelOutput):  # type: ignore[name-defined]
    """transformers' output of an encoder, with the inputs of the decoder's program."""

    #: (B, source) int64, zero at padding
    attention_mask: Tensor | None = None
    #: input of the decoder's program -> one tensor (B, heads, source, width) per layer
    cross: Mapping[str, list[Tensor]] | None = None


class CrossLayer(CacheLayer):
    """Collects the keys and values of cross attention of a layer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.stored = {"keys": key_states, "values": value_states}
        return key_states, value_states


class SourceEncoder(nn.Module):
    """The encoder of a model, and the layers of its decoder that compute the keys and values of cross attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        input_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Encode the one input that is given.

        Args:
            input_ids: tokens, (B, S) int64.
            input_features: features of audio, (B, channels, time).
            input_values: samples of audio, (B, time).
            attention_mask: of tokens and samples: (B, S) or (B, time) int64, zero at padding.

        Returns:
            The encoder's result, (B, source, width); its mask, (B, source) int64; keys, and values: one tensor
            (B, heads, source, width) per layer of the decoder.
        """
        inputs = {"input_ids": input_ids, "input_features": input_features, "input_values": input_values}
        (given,) = ({name: one} for name, one in inputs.items() if one is not None)
        output = self.model.get_encoder()(**given, attention_mask=attention_mask)
        result, mask = output.last_hidden_state, getattr(output, "attention_mask", attention_mask)
        mask = torch.ones_like(result[..., 0], dtype=torch.long) if mask is None else mask.long()
        own, cross = _cache_utils.DynamicCache(), SlotCache([CrossLayer({}) for _ in range(_layers(self.model))], 0)
        cache = _cache_utils.EncoderDecoderCache(own, cross)
        tokens = {"input_ids": torch.zeros_like(mask[:, :1])}  # any token: it does not change what is collected
        self.model(**decoder_call(self.model, tokens, mask, result), use_cache=True, **{CACHE: cache})
        keys, values = ([getattr(layer, name).contiguous() for layer in cross.layers] for name in ("keys", "values"))
        return result, mask, keys, values


def _layers(model: PreTrainedModel) -> int:
    """Return the number of layers of the decoder."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def decoder_call(
    model: PreTrainedModel, tokens: Mapping[str, Any], mask: Tensor | None, result: Tensor | None = None
) -> dict[str, Any]:
    """Return the arguments with which a model of transformers reads tokens.

    Args:
        model: the model.
        tokens: its arguments by the names of a decoder.
        mask: of an encoder-decoder: (B, source) int64, zero where the encoder's result is padding; otherwise None.
        result: the encoder's result, (B, source, width); None: zeros, for a cache that has its keys and values.
    """
    if mask is None:
        return dict(tokens)
    if result is None:
        result = torch.zeros(*mask.shape, model.get_encoder().config.hidden_size, dtype=model.dtype, device=mask.device)
    encoder = {"encoder_outputs": EncoderOutput(result, attention_mask=mask), "attention_mask": mask}
    return {**encoder, **{f"decoder_{name}": value for name, value in tokens.items()}}


class Source(NamedTuple):
    """A kind of input of encoders.

    Args:
        sizes: configuration -> the sizes of an example, without the batch.
        any_length: the last dimension is dynamic, and a mask hides padding.
    """

    sizes: Callable[[Any], tuple[int, ...]]
    any_length: bool = True


#: main input of a model -> its kind
SOURCES = {
    "input_ids": Source(lambda config: (5,)),
    "input_features": Source(lambda config: (config.num_mel_bins, 2 * config.max_source_positions), False),
    "input_values": Source(lambda config: (3072,)),
}


def example_source(model: PreTrainedModel, batch: int = 2) -> dict[str, Tensor]:
    """Return random inputs of `SourceEncoder`; the end of the last sequence is padding where there is a mask.

    Raises:
        MXError: for a model whose encoder takes another kind of input.
    """
    name, generator = model.main_input_name, torch.Generator().manual_seed(0)
    if name not in SOURCES:
        raise MXError(
            f"{type(model).__name__} encodes {name}: only encoders of {', '.join(SOURCES)} can be exported; "
            f"{WITHOUT_EXPORT}"
        )
    shape = (batch, *SOURCES[name].sizes(model.config))
    if name == "input_ids":
        source = torch.randint(model.config.get_text_config().vocab_size, shape, generator=generator)
    else:
        source = torch.randn(shape, generator=generator).to(model.dtype)
    inputs = {name: source}
    if SOURCES[name].any_length:
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
        inputs["attention_mask"][-1, -(shape[1] // 4) :] = 0
    return {name: one.to(model.device) for name, one in inputs.items()}


def encoder_results(outputs: tuple[Any, ...]) -> EncoderOutput:
    """Return the results of a `SourceEncoder`, or its program, as transformers' output of an encoder."""
    result, mask, keys, values = outputs
    return EncoderOutput(result, attention_mask=mask, cross={"cross_keys": [*keys], "cross_values": [*values]})


def decoder_inputs(output: EncoderOutput) -> dict[str, Any]:
    """Return the inputs of the decoder's program that are the encoder's results."""
    return {SOURCE_MASK: output.attention_mask, **(output.cross or {})}


def export_encoder(model: PreTrainedModel) -> ExportedProgram:
    """Export the encoder of a model of transformers, for batches and inputs of any size.

    Raises:
        MXError: for an encoder that cannot be exported.
    """
    encoder, example = SourceEncoder(model), example_source(model)
    with torch.no_grad():
        expected = encoder(**example)[0].float()
    try:
        with with_attention(model), _with_length_of_convolutions(model.get_encoder()), quiet_export():
            program = export(encoder, example)
            _remove_decoder(program)
    except Exception as error:
        text = f"the encoder of {type(model).__name__} cannot be exported: {one_line(error)}"
        raise MXError(f"{text}; {WITHOUT_EXPORT}") from error
    with torch.no_grad():
        result = program.module()(**example)[0].float()
    difference = float((result - expected).norm() / expected.norm())
    if not difference < _AGREEMENT:
        raise MXError(
            f"the exported encoder of {type(model).__name__} gives another result than the model ({difference:.2g} "
            f"of its norm): it cannot be exported; {WITHOUT_EXPORT}"
        )
    return program


@contextmanager
def _with_length_of_convolutions(encoder: Any) -> Iterator[None]:
    """Compute the length of an encoder's result in integers, which a trace keeps, unlike transformers' floats."""

    def length_of(length: Any) -> Any:
        for conv in (module for module in encoder.modules() if isinstance(module, nn.Conv1d)):
            length = (length + 2 * conv.padding[0] - conv.kernel_size[0]) // conv.stride[0] + 1
        return length

    encoder._get_feat_extract_output_lengths = length_of
    try:
        yield
    finally:
        del encoder._get_feat_extract_output_lengths


def _remove_decoder(program: ExportedProgram) -> None:
    """Remove the layers of the decoder that do not compute a result."""
    program.graph.eliminate_dead_code(_is_impure)
    program.graph_module.recompile()


def _is_impure(node: Node) -> bool:
    """Return True for a node to keep: no check of a dtype, and no dropout or attention, which would be random."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.is_impure() and not random and node.target is not torch.ops.aten._assert_tensor_metadata.default


def export(encoder: nn.Module, example: dict[str, Tensor]) -> ExportedProgram:
    """Export a float or a converted encoder, for batches of any size and, where there is a mask, any length."""
    sizes = {0: _SIZE, 1: _SIZE} if "attention_mask" in example else {0: _SIZE}
    shapes = dict.fromkeys(example, sizes)
    return export_program(encoder, (), example, shapes)
