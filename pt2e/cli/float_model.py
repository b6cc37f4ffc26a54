"""The float model of a command and its batches: load them, check both for NaN, and export the model."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError, listed
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.pt2e.cli.checks import normalization_of
from pt2mx.pt2e.cli.inputs import conform, signature_from_factory
from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.files.user_errors import WITHOUT_EXPORT, quiet_export, user_errors
from pt2mx.pt2e.flow.weights import nonfinite_parameters
from pt2mx.pt2e.models.coverage import Coverage, tensors_read
from pt2mx.pt2e.models.float_models import Batch, DynamicShapes, LoadedModel, load_model
from pt2mx.pt2e.models.image_files import normalizing_reader
from pt2mx.pt2e.models.input_files import Reader, load_batches
from pt2mx.pt2e.models.names import IMAGES, Normalization
from pt2mx.pt2e.packages.signature import Signature
from pt2mx.pt2e.program.program import export_program

#: advice for code that cannot be exported
_FOR_CODE = "change that code, or give a factory of the part of the model that can be exported"
#: architectures of transformers that output logits
_LOGITS = re.compile(r"For\w*(Classification|LM|CTC|Generation|PreTraining)$|LMHeadModel$")


def load_float_model(options: argparse.Namespace) -> LoadedModel:
    """Load the model of `options.model` on `options.device`.

    Raises:
        MXError: for a model that cannot be loaded; for one that holds a NaN or an Inf, without `--allow-nan`; for one
            that leaves out more of its checkpoint than `--part` and `--allow-partial` permit.
    """
    with user_errors("load the model"):
        loaded = load_model(options.model, options.dtype).to(options.device)
    if loaded.values is not None:
        loaded.values.held_by().check(options.part, options.allow_partial)
    refuse_nan("the weights", nonfinite_parameters(loaded.module), options)
    return loaded


def load_eval_batches(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Batch]:
    """Load the batches of `options.calibration` by their files, or the model's built-in ones by their numbers.

    Raises:
        MXError: for batches that the model does not take; for batches that hold a NaN, without `--allow-nan`.
    """
    if options.calibration == "none":
        return {}
    given = _given_batches(loaded, options)
    if given is None:
        batches = {f"built-in batch {i}": batch for i, batch in enumerate(loaded.batches)}
    else:
        batches = {}
        for source, batch in given.items():
            # the exported program takes no other form than the example's
            args, kwargs = conform(batch, signature_of(loaded), source, note)
            batches[source] = kwargs if isinstance(loaded.example, dict) else args
        batches = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(options.device), batches)
    for source, batch in batches.items():
        refuse_nan(f"{source}: the inputs", _nonfinite_inputs(loaded, batch), options)
    return batches


def _given_batches(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, object] | None:
    """Return the batches of the user's files or else of the model's code, by their sources; None for neither."""
    if options.calibration is not None:
        how = normalization_of(options)
        readers = loaded.readers if how is None else {IMAGES: _image_reader(loaded, how)}
        return load_batches(options.calibration, readers)
    if loaded.calibration is None:
        return None
    with user_errors("make the calibration batches"):
        batches = {f"calibration batch {i}": batch for i, batch in enumerate(loaded.calibration)}
    if not batches:
        raise MXError(f"the calibration of {options.model} holds no batch: return some, or give --calibration a folder")
    return batches


def _image_reader(loaded: LoadedModel, how: Normalization) -> Reader:
    """Return what makes inputs of images for a model whose only tensor is (N, C, H, W)."""
    tensors = [(name, example) for name, example, _ in signature_of(loaded).inputs if isinstance(example, Tensor)]
    if len(tensors) != 1:
        names = ", ".join(name for name, _ in tensors)
        raise MXError(
            f"--image-size, --mean and --std are for models of one tensor, and this one takes {names}: give "
            "--calibration a folder of .pt or .npz batches, or a factory that returns a transform"
        )
    ((name, example),) = tensors
    return normalizing_reader(how, name, example.shape, example.dtype)


def export(module: nn.Module, batch: Batch, dynamic_shapes: DynamicShapes = None) -> ExportedProgram:
    """Return `torch.export.export` of a module called with a batch."""
    args, kwargs = _arguments(batch)
    with quiet_export():
        return export_program(module, args, kwargs, dynamic_shapes)


def export_loaded(loaded: LoadedModel) -> ExportedProgram:
    """Export a model, called with its example."""
    return export(loaded.module, loaded.example, loaded.dynamic_shapes)


def signature_of(loaded: LoadedModel) -> Signature:
    """Return the signature that the export of a model will have."""
    args, kwargs = _arguments(loaded.example)
    return signature_from_factory(loaded.module.forward, args, kwargs, loaded.dynamic_shapes)


def _arguments(batch: Batch) -> tuple[tuple, dict]:
    return ((), batch) if isinstance(batch, dict) else (batch, {})


def refuse_nan(what: str, names: Iterable[str], options: argparse.Namespace) -> None:
    """Raise an `MXError` if there are names of tensors with NaN or Inf; with `--allow-nan` warn instead."""
    if names := list(names):
        text = f"NaN or Inf in {what} {listed(names)}"
        if not options.allow_nan:
            raise MXError(f"{text}: fix it, or give --allow-nan to quantize anyway")
        note(f"warning: {text}")


def exported_module(
    loaded: LoadedModel, part: str | None = None, allow_partial: bool = False
) -> tuple[GraphModule, Coverage | None, ExportedProgram]:
    """Export a model; return its graph module, the share of its checkpoint's values that it holds, and its program.

    Raises:
        MXError: for a program that leaves out more than `part` and `allow_partial` permit; see `Coverage.check`.
    """
    with user_errors("export the model", _FOR_CODE if loaded.values is None else WITHOUT_EXPORT):
        program = export_loaded(loaded)
    if loaded.values is None:
        return program.module(), None, program
    coverage = loaded.values.held_by(tensors_read(program))
    coverage.check(part, allow_partial)
    note_coverage(coverage)
    # reports count the parameters of the float model: without the parts that the program leaves out
    return remove_unused(program.module()), coverage, program


def note_coverage(coverage: Coverage) -> None:
    """Note the share of a checkpoint that a program holds, where it is not all of it."""
    if coverage.held < coverage.values:
        note(f"the program holds {coverage}")


def metric_of(options: argparse.Namespace, loaded: LoadedModel) -> str:
    """Return the metric of the options; by default the one that fits the model."""
    if options.metric is not None:
        return options.metric
    logits = options.model.startswith("torchvision:") or _LOGITS.search(type(loaded.module).__name__)
    return "kl" if logits else "cosine"


def count_batches(batches: Sequence[object]) -> str:
    """Return the number of batches in words."""
    return f"{len(batches)} batch{'es' * (len(batches) != 1)}"


def _nonfinite_inputs(loaded: LoadedModel, batch: Batch) -> Iterable[str]:
    """Yield the inputs that hold a NaN, or no finite value at all: a mask may mix -Inf with finite values."""
    leaves = pytree.tree_leaves(batch)
    for name, leaf in zip(signature_of(loaded).names, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            if leaf.isnan().any() or not leaf.isfinite().any():
                yield name
