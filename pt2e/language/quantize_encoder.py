"""Read texts for the decoder of a float model, and export and quantize the encoder that the decoder reads besides its
tokens, if the model has one: a vision tower, or the encoder of an encoder-decoder."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.algorithms.options import look_at_inputs
from pt2mx.errors import MXError
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.pt2e.files.user_errors import WITHOUT_EXPORT
from pt2mx.pt2e.flow.weights import carry_notes
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.cache import Layers, has_source
from pt2mx.pt2e.language.encoder import Encoder
from pt2mx.pt2e.language.images import read_images
from pt2mx.pt2e.language.merge_images import ImageInputs
from pt2mx.pt2e.language.positions import check_positions, positions_of
from pt2mx.pt2e.language.quantize_graph import quantize_graph, unmatched_settings
from pt2mx.pt2e.language.source import (
    SOURCES,
    SourceEncoder,
    decoder_inputs,
    encoder_results,
    example_source,
    export,
    export_encoder,
)
from pt2mx.pt2e.language.tensor_parallel import is_shard
from pt2mx.pt2e.language.vision import IMAGES, check_images, example_images, export_tower, has_tower, tower_of
from pt2mx.pt2e.program.build_program import program_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: tokens that a decoder reads for each source that calibrates it
_TOKENS = 64
#: options of `distill`
_Options = Mapping[str, Any] | None

#: what calibrates a model: tokens, or what the processor gives for prompts with images or for audio
Text = Tensor | Mapping[str, Tensor]


def tokens_of(text: Text) -> Tensor:
    return text if isinstance(text, Tensor) else text["input_ids"]


def float_inputs_of(model: PreTrainedModel, layers: Layers, part: str | None) -> FloatText:
    """Return what reads texts for the decoder of a model; its encoder, if it has one, is exported now.

    `layers` are those of the decoder's cache; `part` is the argument of `quantize_language_model`."""
    if has_source(layers):
        return FloatSource(model, layers)
    if part is None and has_tower(model):
        return FloatTower(model, layers)
    return FloatText(model, layers)


class FloatText:
    """Reads texts for the decoder of a float model that reads tokens alone."""

    #: the exported encoder
    encoder: ExportedProgram | None = None
    #: the image inputs of the decoder
    images: ImageInputs | None = None
    #: the settings that match no operator of the encoder
    unmatched: set[str] | None = None

    def __init__(self, model: PreTrainedModel, layers: Layers) -> None:
        self.model, self.layers = model, layers

    def check(self, program: ExportedProgram, texts: Sequence[Text]) -> None:
        """Check that the decoder's program can read the texts."""
        positions = positions_of(program)
        for text in texts:
            check_positions(positions, 0, torch.arange(tokens_of(text).shape[1])[None])

    def read(self, text: Text) -> dict[str, Any]:
        """Return the inputs with which the decoder reads a text."""
        return decoder.inputs(self.layers, self.model.device, tokens_of(text), images=self.images)

    def quantized_encoder(
        self, quantizer: MXQuantizer, texts: Sequence[Text], lessons: Sequence[Text], training: _Options
    ) -> ExportedProgram | None:
        """Return the quantized encoder, calibrated with texts and trained on lessons by options of `distill`."""
        return None


class FloatTower(FloatText):
    """Reads texts with images, by the exported vision tower of a float model."""

    encoder: ExportedProgram
    unmatched: set[str]

    def __init__(self, model: PreTrainedModel, layers: Layers) -> None:
        super().__init__(model, layers)
        self.encoder, self.images = export_tower(model), ImageInputs.of_model(model)
        self.unmatched = set()
        self._encoder = Encoder(self.encoder, model.device)

    def check(self, program: ExportedProgram, texts: Sequence[Text]) -> None:
        """Also compare tower and decoder with the model on a prompt with two images."""
        super().check(program, texts)
        if is_shard(program):
            raise MXError("a model with a vision tower cannot be divided among ranks: quantize it whole")
        model, config = self.model, self.model.config
        given = example_images(config)
        number = len(self._encoder(**self._inputs(given))[0])
        first = number // 2  # of the first image
        if "image_grid_thw" in given:
            first = int(given["image_grid_thw"][0].prod()) // config.vision_config.spatial_merge_size**2
        token = config.image_token_id
        text = [1, 2] if token > 2 else [token + 1, token + 2]
        prompt = [*text, *[token] * first, *text, *[token] * (number - first), *text]
        tokens = torch.tensor([prompt]).to(model.device)
        for name in tower_of(config).given:
            if name.endswith("token_type_ids"):
                given[name] = (tokens == token).long()
        given = {name: value.to(model.device) for name, value in given.items()}
        with torch.no_grad():
            actual = program.module(check_guards=False)(**self.read({"input_ids": tokens, **given}))
            expected = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **given).logits
        if (error := decoder.relative_error(actual, expected)) is not None:
            raise MXError(
                f"{type(model).__name__} gives other logits for a prompt with images than its programs ({error:.2g} of "
                f"their norm): it cannot be exported with its vision tower; {WITHOUT_EXPORT}"
            )

    def read(self, text: Text) -> dict[str, Any]:
        """Return the inputs with which the decoder reads a text and its images, if there are any."""
        inputs = super().read(text)
        if isinstance(text, Tensor) or IMAGES not in text:
            return inputs
        return inputs | read_images(self._encoder, self.model.config, tokens_of(text), None, text)

    def quantized_encoder(
        self, quantizer: MXQuantizer, texts: Sequence[Text], lessons: Sequence[Text], training: _Options
    ) -> ExportedProgram:
        """Return the quantized tower, calibrated with the images of texts; lessons do not train it."""
        batches = [self._inputs(text) for text in texts if not isinstance(text, Tensor) and IMAGES in text]
        if not batches and look_at_inputs(quantizer.algorithms or ()):
            raise MXError(
                "the algorithms look at inputs, and the texts have no images for the vision tower: give what the "
                "processor returns for prompts with images, or take algorithms that do not, such as 'fast'"
            )
        converted = _quantized(self.encoder, quantizer, batches, self.unmatched)
        program = program_of(converted, self.encoder)
        carry_notes(converted, program.graph_module)
        return program

    def _inputs(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the tower for what a processor gives."""
        config, device = self.model.config, self.model.device
        images = check_images(config, given)
        return tower_of(config).prepare(config, {name: value.to(device) for name, value in images.items()})


class FloatSource(FloatText):
    """Reads sources, tokens or audio, by the exported encoder of a float encoder-decoder."""

    encoder: ExportedProgram
    unmatched: set[str]

    def __init__(self, model: PreTrainedModel, layers: Layers) -> None:
        super().__init__(model, layers)
        self.encoder = export_encoder(model)
        self.unmatched = set()
        self._positions = positions_of(self.encoder)

    def check(self, program: ExportedProgram, texts: Sequence[Text]) -> None:
        """Check nothing: `read` checks sources, and the model decides the length of what the decoder reads."""

    @torch.no_grad()
    def read(self, text: Text) -> dict[str, Any]:
        """Return the inputs with which the decoder reads the text that the model generates from a source."""
        inputs = self._inputs(text)
        encoded = encoder_results(SourceEncoder(self.model)(**inputs))
        options = {"max_new_tokens": _TOKENS, "do_sample": False, "num_beams": 1}
        # a tensor would leave out the tokens with which Whisper's text begins: language and task
        written = self.model.generate(**inputs, **options, return_dict_in_generate=True)
        return {**super().read(written["sequences"]), **decoder_inputs(encoded)}

    def quantized_encoder(
        self, quantizer: MXQuantizer, texts: Sequence[Text], lessons: Sequence[Text], training: _Options
    ) -> ExportedProgram:
        """Return the quantized encoder, calibrated with sources without padding, and trained on such sources."""
        batches, lesson_batches = ([self._inputs(text) for text in given] for given in (texts, lessons))
        converted = _quantized(self.encoder, quantizer, batches, self.unmatched, lesson_batches, training)
        program = export(converted, example_source(self.model))
        carry_notes(converted, program.graph_module)
        return program

    def _inputs(self, text: Text) -> dict[str, Tensor]:
        """Return the inputs of the encoder for a source without padding."""
        name = self.model.main_input_name
        source = text if isinstance(text, Tensor) else text[name]
        if source.is_floating_point() == (name == "input_ids"):
            wanted = "tokens" if name == "input_ids" else "what its feature extractor makes of audio"
            raise MXError(f"{type(self.model).__name__} reads {name}, not a source of {source.dtype}: give {wanted}")
        given = {name: source.to(self.model.device, None if name == "input_ids" else self.model.dtype)}
        if SOURCES[name].any_length:
            check_positions(self._positions, 0, given[name])
            given["attention_mask"] = torch.ones_like(given[name], dtype=torch.long)
        return given


def _quantized(
    encoder: ExportedProgram,
    quantizer: MXQuantizer,
    batches: Sequence[dict[str, Any]],
    unmatched: set[str],
    lessons: Sequence[dict[str, Any]] = (),
    training: _Options = None,
) -> GraphModule:
    """Quantize the graph of an encoder, which writes to no cache. `unmatched` gets the settings that match no
    operator. On lessons it is trained to return what the float encoder does."""
    graph = remove_unused(encoder.module(check_guards=False))
    with unmatched_settings(unmatched):
        quantizer = copy.copy(quantizer).set_kv_cache(None)
        return quantize_graph(graph, quantizer, batches, lessons=lessons, training=training, loss="relative")
