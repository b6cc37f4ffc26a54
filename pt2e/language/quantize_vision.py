"""Export and quantize the vision tower of a model, whose features the decoder reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from pt2mx.algorithms.options import look_at_inputs
from pt2mx.errors import MXError
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.pt2e.files.user_errors import WITHOUT_EXPORT
from pt2mx.pt2e.flow.weights import carry_notes
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.cache import Layers
from pt2mx.pt2e.language.encoder import Encoder
from pt2mx.pt2e.language.images import read_images
from pt2mx.pt2e.language.merge_images import ImageInputs
from pt2mx.pt2e.language.quantize_graph import quantize_graph, unmatched_settings
from pt2mx.pt2e.language.tensor_parallel import is_shard
from pt2mx.pt2e.language.vision import IMAGES, check_images, example_images, export_tower, tower_of
from pt2mx.pt2e.program.build_program import program_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: what calibrates a model: tokens, or what the processor gives for prompts with images
Text = Tensor | Mapping[str, Tensor]


def tokens_of(text: Text) -> Tensor:
    return text if isinstance(text, Tensor) else text["input_ids"]


class FloatTower:
    """The exported vision tower of a float model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.program, self.images = model, export_tower(model), ImageInputs.of_model(model)
        self._encoder = Encoder(self.program, model.device)
        self.unmatched: set[str] = set()

    def read(self, text: Text) -> dict[str, Any]:
        """Return the image inputs of the decoder for a text; empty for one without images."""
        if isinstance(text, Tensor) or IMAGES not in text:
            return {}
        return read_images(self._encoder, self.model.config, tokens_of(text), None, text)

    def check(self, program: ExportedProgram, layers: Layers) -> None:
        """Compare tower and decoder with the model on a prompt with two images."""
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
        call = decoder.inputs(layers, model.device, tokens, images=self.images)
        with torch.no_grad():
            actual = program.module(check_guards=False)(**call | self.read({"input_ids": tokens, **given}))
            expected = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **given).logits
        if (error := decoder.relative_error(actual, expected)) is not None:
            raise MXError(
                f"{type(model).__name__} gives other logits for a prompt with images than its programs ({error:.2g} of "
                f"their norm): it cannot be exported with its vision tower; {WITHOUT_EXPORT}"
            )

    def quantized(self, quantizer: MXQuantizer, texts: Sequence[Text]) -> ExportedProgram:
        """Quantize the tower, calibrated with the images of the texts."""
        batches = [self._inputs(text) for text in texts if not isinstance(text, Tensor) and IMAGES in text]
        if not batches and look_at_inputs(quantizer.algorithms or ()):
            raise MXError(
                "the algorithms look at inputs, and the texts have no images for the vision tower: give what the "
                "processor returns for prompts with images, or take algorithms that do not, such as 'fast'"
            )
        graph = remove_unused(self.program.module(check_guards=False))
        with unmatched_settings(self.unmatched):
            converted = quantize_graph(graph, copy.copy(quantizer).set_kv_cache(None), batches)
        program = program_of(converted, self.program)
        carry_notes(converted, program.graph_module)
        return program

    def _inputs(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the program for what a processor gives."""
        config, device = self.model.config, self.model.device
        images = check_images(config, given)
        return tower_of(config).prepare(config, {name: value.to(device) for name, value in images.items()})
