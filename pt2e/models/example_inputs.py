"""The inputs of a checkpoint's model: built-in texts and noise, and inputs made of images and recordings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.input_files import Reader, groups
from pt2mx.pt2e.models.names import IMAGES
from pt2mx.pt2e.models.processors import PROCESSORS, media_config, shape_from_config
from pt2mx.pt2e.models.samples import sentences

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: texts, images or recordings in a built-in batch, and the tokens of a random text
_BATCH, _LENGTH = 2, 33


#: inputs that can be built in
_BUILT_IN = {"input_ids", "decoder_input_ids", *PROCESSORS}


def texts(config: PretrainedConfig, name: str) -> dict[str, Tensor]:
    """Return the built-in sentences in the tokens of a checkpoint, and their mask.

    Without a tokenizer, or with one without a vocabulary, the tokens are random.
    """
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    limits = {"padding": True, "truncation": longest is not None, "max_length": longest}
    transformers = import_extra("transformers", "hf")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokens = tokenizer(sentences()[:8], return_tensors="pt", return_attention_mask=True, **limits)
        ids = tokens["input_ids"]
        if ids.unique().numel() >= 8 and ids.max() < config.vocab_size:
            return {"input_ids": ids, "attention_mask": tokens["attention_mask"]}
    except Exception:  # each tokenizer fails in its own way
        pass
    ids = torch.randint(config.vocab_size, (_BATCH, min(_LENGTH, longest or _LENGTH)))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class CheckpointInputs:
    """The inputs of a checkpoint's model: texts, and images or recordings.

    Args:
        module: the model.
        name: the checkpoint, as `load_pretrained` takes it.
    """

    def __init__(self, module: PreTrainedModel, name: str) -> None:
        self._module, self._name = module, name
        self._parameters = inspect.signature(module.forward).parameters
        self._needed = self._inputs()
        self._medium = next((key for key in self._needed if key in PROCESSORS), None)
        self._config = media_config(module.config)
        self._processor, self._missing = None, ""
        if self._medium is not None:
            try:
                self._processor = PROCESSORS[self._medium](name, self._config)
            except MXError as error:  # only files need it, and configs that state no shape
                self._missing = str(error)

    def batches(self) -> list[dict[str, Tensor]]:
        """Return built-in batches of keyword arguments: sentences and noise.

        The checkpoint's tokenizer and processor make them; without these they have the shapes that its config states.

        Raises:
            MXError: for a model with inputs of another kind.
        """
        return [self._batch() for _ in range(1 if "input_ids" in self._needed else 2)]

    def dynamic_shapes(self, example: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
        """Return the dynamic shapes of a batch, as `torch.export.export` takes them.

        Every dimension is dynamic except those that all images or recordings share: for a Swin with dynamic sizes
        export takes minutes.
        """
        fixed, shapes = self._fixed(example), {}
        for key, value in example.items():
            dynamic = [i for i in range(value.dim()) if i not in fixed.get(key, ())]
            shapes[key] = dict.fromkeys(dynamic, torch.export.Dim.AUTO)
        return shapes

    def readers(self, example: dict[str, Tensor]) -> dict[str, Reader]:
        """Return the kind of files that the inputs can be made of -> the function that makes batches of them.

        Args:
            example: one batch; the inputs that no file gives are taken from it.
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
        needed = {self._module.main_input_name}
        if "return_loss" in self._parameters:  # texts are compared with images or recordings (CLIP, SigLIP, CLAP)
            needed |= {"input_ids", *PROCESSORS}
        if self._module.config.is_encoder_decoder:
            needed.add("decoder_input_ids")
        for key, parameter in self._parameters.items():
            if key in _BUILT_IN and parameter.default is parameter.empty:
                needed.add(key)
        order = [key for key in self._parameters if key != "decoder_input_ids"] + ["decoder_input_ids"]
        return sorted(needed & self._parameters.keys(), key=order.index)

    def _batch(self) -> dict[str, Tensor]:
        config = self._module.config
        batch: dict[str, Tensor] = {}
        for key in self._needed:
            if key == "input_ids":
                batch |= texts(config, self._name)
            elif key != "decoder_input_ids":
                batch |= self._noise(key)
            elif "input_ids" in batch:
                batch[key] = batch["input_ids"].clone()
            else:
                batch[key] = torch.randint(config.get_text_config().vocab_size, (_BATCH, _LENGTH // 4))
        return self._of_model(batch)

    def _of_model(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of a batch that the model takes, in the order of `forward` and in the model's dtype."""
        values = {key: batch[key] for key in self._parameters if key in batch}
        return {key: t.to(self._module.dtype) if t.is_floating_point() else t for key, t in values.items()}

    def _noise(self, key: str) -> dict[str, Tensor]:
        if key == self._medium and self._processor is not None:
            return self._processor.inputs([self._processor.noise() for _ in range(_BATCH)])
        shape = shape_from_config(key, self._config)
        if shape is None:
            reason = f" ({self._missing})" if self._missing else ""
            raise MXError(
                f"{self._name}: no built-in inputs for {key!r} of {type(self._module).__name__}{reason}: give "
                "--model module.py:factory, a function that returns the model and example inputs"
            )
        return {key: torch.randn(_BATCH, *shape)}

    def _fixed(self, example: dict[str, Tensor]) -> dict[str, set[int]]:
        """Return the dimensions that all images or recordings share, except the batch, by input."""
        if self._medium is None:
            return {}
        if self._processor is None:  # a config states the size of images, but no length of recordings
            images = PROCESSORS[self._medium].kind == IMAGES
            return {self._medium: set(range(1, example[self._medium].dim()))} if images else {}
        one, other = (self._processor.inputs([item]) for item in self._processor.extremes())
        fixed = {}
        for key, tensor in one.items():
            fixed[key] = {i for i in range(1, tensor.dim()) if tensor.shape[i] == other[key].shape[i]}
        return fixed
