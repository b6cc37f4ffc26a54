"""Inputs of the model of a checkpoint: built-in ones, and those made of images and recordings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.calibration import IMAGES, Reader, groups
from pt2mx.pt2e.cli.checkpoint_texts import TEXTS
from pt2mx.pt2e.cli.config_shapes import input_shape, part_of_media
from pt2mx.pt2e.cli.processors import PROCESSORS
from pt2mx.pt2e.user_errors import user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: built-in images or recordings in a batch
_BATCH = 2
#: inputs of which there are built-in ones
_MADE = TEXTS.keys() | PROCESSORS.keys()


class CheckpointInputs:
    """The inputs of the model of a checkpoint: texts, and images or recordings.

    Args:
        module: the model.
        name: of its checkpoint, as `load_checkpoint` takes it.
    """

    def __init__(self, module: PreTrainedModel, name: str) -> None:
        self._module, self._name = module, name
        self._taken = inspect.signature(module.forward).parameters
        self._needed = self._inputs()
        self._medium = next((key for key in self._needed if key in PROCESSORS), None)
        self._config = part_of_media(module.config)
        self._processor, self._missing = None, ""
        if self._medium is not None:
            try:
                self._processor = PROCESSORS[self._medium](name, self._config)
            except MXError as error:  # it is needed where the config does not suffice, and for files
                self._missing = str(error)

    def batches(self) -> list[dict[str, Tensor]]:
        """Return built-in batches of keyword arguments: sentences and noise, as the checkpoint's tokenizer and
        processor make them, or else of the shapes that its config says.

        Raises:
            MXError: for a model with inputs of a kind that is not built in.
        """
        return [self._batch() for _ in range(1 if "input_ids" in self._needed else 2)]

    def dynamic_shapes(self, example: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
        """Return the dynamic shapes of a batch, as `torch.export.export` takes them.

        Every dimension may vary, save those that are the same for all images or recordings: for a Swin export would
        spend minutes on other sizes.
        """
        fixed = self._fixed(example)
        return {
            key: {i: torch.export.Dim.AUTO for i in range(value.dim()) if i not in fixed.get(key, ())}
            for key, value in example.items()
        }

    def readers(self, example: dict[str, Tensor]) -> dict[str, Reader]:
        """Return what makes batches of files, by the kind of files that the inputs are made of.

        Args:
            example: one batch; inputs that are made of no file are as in it.
        """
        if self._medium is None:
            return {}
        size = len(example[self._medium])

        def read(files: list[Path]) -> dict[str, object]:
            if self._processor is None:
                raise MXError(
                    f"{self._missing}: add the preprocessor_config.json that the model was trained with, or give "
                    "--calibration a folder of .pt or .npz batches"
                )
            batches: dict[str, object] = {}
            for group in groups(files, size):
                source = ", ".join(map(str, group))
                items = [self._processor.read(file) for file in group]
                with user_errors(f"make inputs of {source}"):
                    batches[source] = {**example, **self._of_model(self._processor.inputs(items))}
            return batches

        return {PROCESSORS[self._medium].kind: read}

    def _inputs(self) -> list[str]:
        """Return the inputs that a call needs, in the order in which they are made."""
        needed = {self._module.main_input_name}
        if "return_loss" in self._taken:  # texts are compared with images or recordings (CLIP, SigLIP, CLAP)
            needed |= {"input_ids", *PROCESSORS} & self._taken.keys()
        if self._module.config.is_encoder_decoder:
            needed |= {"decoder_input_ids"} & self._taken.keys()
        needed |= {key for key, of in self._taken.items() if key in _MADE and of.default is of.empty}
        return sorted(needed, key=lambda key: (key == "decoder_input_ids", list(self._taken).index(key)))

    def _batch(self) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        for key in self._needed:
            batch |= TEXTS[key](self._module.config, self._name, batch) if key in TEXTS else self._noise(key)
        return self._of_model(batch)

    def _of_model(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the model takes of a batch, in the order of `forward` and in the model's dtype."""
        values = {key: batch[key] for key in self._taken if key in batch}
        return {key: t.to(self._module.dtype) if t.is_floating_point() else t for key, t in values.items()}

    def _noise(self, key: str) -> dict[str, Tensor]:
        if key == self._medium and self._processor is not None:
            return self._processor.inputs([self._processor.noise() for _ in range(_BATCH)])
        shape = input_shape(key, self._config)
        if shape is None:
            why = f" ({self._missing})" if self._missing else ""
            raise MXError(
                f"{self._name}: no built-in inputs for {key!r} of {type(self._module).__name__}{why}: give "
                "--model module.py:factory, a function that returns the model and example inputs"
            )
        return {key: torch.randn(_BATCH, *shape)}

    def _fixed(self, example: dict[str, Tensor]) -> dict[str, set[int]]:
        """Return the dimensions, the batch apart, that are the same for all images or recordings, by inputs."""
        if self._medium is None:
            return {}
        if self._processor is None:  # a config says the size of images, and of recordings no length
            images = PROCESSORS[self._medium].kind == IMAGES
            return {self._medium: set(range(1, example[self._medium].dim()))} if images else {}
        one, other = (self._processor.inputs([item]) for item in self._processor.extremes())
        return {key: {i for i in range(1, t.dim()) if t.shape[i] == other[key].shape[i]} for key, t in one.items()}
