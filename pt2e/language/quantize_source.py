"""Export and quantize the encoder of an encoder-decoder, whose results the decoder reads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from pt2mx.extras import import_extra
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.pt2e.flow.weights import carry_notes
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.cache import Layers
from pt2mx.pt2e.language.positions import check_positions, positions_of
from pt2mx.pt2e.language.quantize_graph import quantize_graph, unmatched_settings
from pt2mx.pt2e.language.quantize_vision import Text
from pt2mx.pt2e.language.source import (
    SOURCES,
    SourceEncoder,
    decoder_inputs,
    encoder_results,
    example_source,
    export,
    export_encoder,
)
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: tokens that the decoder reads for each source that calibrates it
_TOKENS = 64


class FloatSource:
    """The exported encoder of a float model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.program = model, export_encoder(model)
        self.positions = positions_of(self.program)
        self.unmatched: set[str] = set()

    @torch.no_grad()
    def read(self, source: Text, layers: Layers) -> dict[str, Any]:
        """Return the inputs with which the decoder reads the text that the model generates from a source."""
        inputs = self._inputs(source)
        encoded = encoder_results(SourceEncoder(self.model)(**inputs))
        generation = import_extra("transformers.generation.utils", "hf").GenerationMixin
        # Whisper's own method leaves out the first tokens
        tokens = generation.generate(self.model, **inputs, max_new_tokens=_TOKENS, do_sample=False, num_beams=1)
        return {**decoder.inputs(layers, self.model.device, tokens), **decoder_inputs(encoded)}

    def quantized(self, quantizer: MXQuantizer, sources: Sequence[Text]) -> ExportedProgram:
        """Quantize the encoder, calibrated with tokens or audio without padding."""
        batches = [self._inputs(source) for source in sources]
        quantizer = copy.copy(quantizer).set_kv_cache(None)  # an encoder writes to no cache
        graph = remove_unused(self.program.module(check_guards=False))
        with unmatched_settings(self.unmatched):
            converted = quantize_graph(graph, quantizer, batches)
        program = export(converted, example_source(self.model))
        carry_notes(converted, program.graph_module)
        return program

    def _inputs(self, text: Text) -> dict[str, Tensor]:
        """Return the inputs of the program for a source without padding."""
        name = self.model.main_input_name
        source = text if isinstance(text, Tensor) else text[name]
        given = {name: source.to(self.model.device, None if name == "input_ids" else self.model.dtype)}
        if SOURCES[name].any_length:
            check_positions(self.positions, 0, given[name])
            given["attention_mask"] = torch.ones_like(given[name], dtype=torch.long)
        return given
