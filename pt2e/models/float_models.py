"""Load a float model from what names it, with example inputs for an export and batches to calibrate with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError, nearest
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.python_file import import_file
from pt2mx.pt2e.models.coverage import CheckpointValues
from pt2mx.pt2e.models.example_inputs import CheckpointInputs
from pt2mx.pt2e.models.image_files import image_reader
from pt2mx.pt2e.models.input_files import Reader
from pt2mx.pt2e.models.names import IMAGES, check_model, source_file
from pt2mx.pt2e.models.packaged import load_minilm
from pt2mx.pt2e.models.pretrained import checkpoint_values, load_pretrained
from pt2mx.pt2e.models.samples import sentences

#: positional or keyword arguments of one call
Batch = tuple | dict
#: as `torch.export.export` takes them
DynamicShapes = dict[str, Any] | tuple[Any, ...] | list[Any] | None

#: built-in images in a batch, and their shape where the weights state none
_BATCH, _SHAPE = 2, (3, 224, 224)
#: what a factory returns: the first two or three as a tuple, or these keys of a dict, of which the first two must be
#: there. `calibration`: an iterable of batches; `transform`: an image of Pillow -> the inputs of one row
_OF_FACTORIES = ("model", "example_inputs", "dynamic_shapes", "calibration", "transform")
#: arguments by which torchvision downloads weights
_PRETRAINED = ("weights", "weights_backbone")


@dataclass
class LoadedModel:
    """A float model ready for export.

    Args:
        module: the model, in evaluation mode.
        example: one batch: a tuple of positional or a dict of keyword arguments.
        dynamic_shapes: as `torch.export.export` takes them.
        batches: the built-in calibration sample, in the form of `example`.
        readers: kind of files -> the function that makes batches of them, as `load_batches` takes it.
        values: the values of the checkpoint that the model was loaded from; None: code made the model.
        calibration: batches of code in place of `batches`, each as a file of a batch holds it; None for none.
    """

    module: nn.Module
    example: Batch
    dynamic_shapes: DynamicShapes = None
    batches: Sequence[Batch] = ()
    readers: Mapping[str, Reader] = field(default_factory=dict)
    values: CheckpointValues | None = None
    calibration: Iterable[object] | None = None

    def to(self, device: str) -> LoadedModel:
        """Move the model and its inputs to a device."""
        example, batches = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (self.example, self.batches))
        return replace(self, module=self.module.to(device), example=example, batches=batches)


def call(model: Callable[..., object], batch: Batch) -> object:
    """Call a model with a copy of a batch: the model may write to its inputs."""
    batch = pytree.tree_map_only(Tensor, Tensor.clone, batch)
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def load_model(source: str, dtype: str | None = None) -> LoadedModel:
    """Load the model that a text names.

    Args:
        source: `minilm`, `torchvision:NAME`, `hf:DIRECTORY_OR_NAME` or `module.py:factory`. A factory returns the
            model, its example inputs (a tuple or a dict) and, optionally, dynamic shapes, or a dict of `_OF_FACTORIES`.
        dtype: for a checkpoint: the dtype to load it in, such as "bfloat16"; None: its own.
    """
    if source == "minilm":
        return _minilm()
    kind, _, name = source.partition(":")
    if kind == "hf":
        return _hugging_face(name, dtype)
    if kind == "torchvision":
        return _torchvision(name)
    check_model(source)
    path = source_file(source)
    if path is None:
        raise MXError(f"{source!r} is no PyTorch model: `pt2mx quantize` alone takes an ONNX file")
    return _from_factory(path, source.removeprefix(f"{path}:"))


def _minilm() -> LoadedModel:
    encoder, tokenize = load_minilm()
    texts = sentences()
    batches = [tokenize(texts[i : i + 12]) for i in range(0, len(texts), 12)]
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
    return LoadedModel(encoder, batches[0], {"input_ids": shape, "attention_mask": shape}, batches)


def _torchvision(name: str) -> LoadedModel:
    models = import_extra("torchvision", "vision").models
    if name not in models.list_models():
        raise MXError(f"torchvision has no model {name!r}: {nearest(name, models.list_models()).split(' allowed')[0]}")
    torch.manual_seed(0)
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    module = models.get_model(name, **{key: None for key in _PRETRAINED if key in parameters}).eval()
    transform = _transform(models, name, module)
    shape = _SHAPE if transform is None else tuple(transform(torch.zeros(_SHAPE, dtype=torch.uint8)).shape)
    batches = [(torch.randn(_BATCH, *shape),) for _ in range(2)]
    readers = {} if transform is None else {IMAGES: _image_reader(transform, list(shape[1:]))}
    return LoadedModel(module, batches[0], ({0: torch.export.Dim("batch")},), batches, readers)


def _transform(models: Any, name: str, module: nn.Module) -> Callable[[Any], Tensor] | None:
    """Return the transform that prepares images as for the pretrained weights.

    Where the model has a fixed size, the transform is of weights of that size. None where there is no transform, as for
    models of lists or videos.
    """
    of_images = (models, models.quantization, models.segmentation)
    if not any(name in models.list_models(module=part) for part in of_images):
        return None
    weights = models.get_model_weights(name)
    size = getattr(module, "image_size", None)
    for pretrained in (weights.DEFAULT, *weights):
        transform = pretrained.transforms()
        if size is None or size in transform.crop_size:
            return transform
    return None


def _image_reader(transform: Callable[[Any], Tensor], size: list[int]) -> Reader:
    crop = import_extra("torchvision.transforms.functional", "vision").center_crop
    # some transforms keep an image's proportions, and images of several shapes make no batch
    return image_reader(lambda image: crop(transform(image), size), _BATCH)


def _hugging_face(name: str, dtype: str | None) -> LoadedModel:
    module = load_pretrained(name, dtype)
    torch.manual_seed(0)
    inputs = CheckpointInputs(module, name)
    batches = inputs.batches()
    shapes, readers = inputs.dynamic_shapes(batches[0]), inputs.readers(batches[0])
    return LoadedModel(module, batches[0], shapes, batches, readers, checkpoint_values(module, name))


def _from_factory(path: str, factory: str) -> LoadedModel:
    module = import_file(path)
    function = getattr(module, factory, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise MXError(f"{path} has no function {factory!r}: {nearest(factory, names)}")
    result = function()
    if isinstance(result, tuple) and len(result) in (2, 3):
        result = dict(zip(_OF_FACTORIES, result, strict=False))
    if not isinstance(result, dict) or not isinstance(result.get("model"), nn.Module) or "example_inputs" not in result:
        raise MXError(
            f"{factory} must return (model, example_inputs), (model, example_inputs, dynamic_shapes), or a dict of "
            "'model', 'example_inputs' and, optionally, 'dynamic_shapes', 'calibration' and 'transform'"
        )
    for name in result:
        if name not in _OF_FACTORIES:
            raise MXError(f"{factory} returns {name!r}, which has no meaning: {nearest(name, _OF_FACTORIES)}")
    example, calibration, transform = (result.get(name) for name in ("example_inputs", "calibration", "transform"))
    if not isinstance(example, dict):
        example = tuple(example) if isinstance(example, list | tuple) else (example,)
    if calibration is not None and (isinstance(calibration, Tensor | dict) or not isinstance(calibration, Iterable)):
        raise MXError(f"{factory}: calibration must be an iterable of batches, not {type(calibration).__name__}")
    if transform is not None and not callable(transform):
        raise MXError(f"{factory}: transform must be a function of an image, not {type(transform).__name__}")
    rows = [leaf.shape[0] for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    readers = {} if transform is None else {IMAGES: image_reader(transform, rows[0] if rows else 1)}
    shapes = result.get("dynamic_shapes")
    return LoadedModel(result["model"].eval(), example, shapes, [example], readers, calibration=calibration)
