"""A model that a command names, with its batches, in which no NaN hides."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.pt2e.checkpoints.coverage import Coverage, tensors_read
from pt2mx.pt2e.cli.calibration import batch_files, load_batches
from pt2mx.pt2e.cli.models import Batch, LoadedModel, load_model, source_file
from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.report.finite import listed, nonfinite_parameters
from pt2mx.pt2e.user_errors import WITHOUT_EXPORT, user_errors

#: options that say how a checkpoint is loaded
_OF_CHECKPOINTS = ("part", "allow_partial", "dtype")
#: the ways for a model that cannot be exported
_FOR_CODE = "change that code, or give a factory of the part of the model that can be exported"


def check_checkpoint_options(options: argparse.Namespace) -> None:
    """Raise an error for options of checkpoints where the model is none."""
    given = [name for name in _OF_CHECKPOINTS if getattr(options, name, None)]
    if given and not options.model.startswith("hf:"):
        raise MXError(f"--{given[0].replace('_', '-')} is for checkpoints (hf:NAME), and {options.model!r} is none")


def checked_model(options: argparse.Namespace) -> LoadedModel:
    """Return the model of `options.model` on `options.device`.

    Raises:
        MXError: for a model that cannot be loaded, without `--allow-nan` one that holds a NaN or an Inf, and for a
            checkpoint of which it leaves out more than `--part` and `--allow-partial` say.
    """
    with user_errors("load the model"):
        loaded = load_model(options.model, getattr(options, "dtype", None)).to(options.device)
    if loaded.values is not None:
        loaded.values.held_by().check(options.part, options.allow_partial)
    refuse_nan("the weights", nonfinite_parameters(loaded.module), options)
    return loaded


def checked_batches(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Batch]:
    """Return the batches of `options.calibration` by their files or, for a built-in one, its number.

    Raises:
        MXError: for batches that the model does not take, and without `--allow-nan` for such as hold a NaN.
    """
    if options.calibration is None:
        batches = {f"built-in batch {i}": batch for i, batch in enumerate(loaded.batches)}
    elif options.calibration == "none":
        return {}
    else:
        given = load_batches(options.calibration, loaded.readers)
        conformed = {source: loaded.conform(batch, source, note) for source, batch in given.items()}
        batches = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(options.device), conformed)
    for source, batch in batches.items():
        refuse_nan(f"{source}: the inputs", _nonfinite_inputs(loaded, batch), options)
    return batches


def input_files(options: argparse.Namespace) -> dict[str, object]:
    """Return the user's files that `options.model` and `options.calibration` name, by what an error calls them."""
    files: dict[str, object] = {"the model": source_file(options.model)}
    if options.model.startswith("hf:"):
        folder = Path(options.model.removeprefix("hf:"))
        files |= {f"the checkpoint's file {file.name!r}": file for file in folder.glob("*")}
    if options.calibration not in (None, "none"):
        files |= {f"the calibration batch {file.name!r}": file for file in batch_files(options.calibration)}
    return files


def refuse_nan(what: str, names: Iterable[str], options: argparse.Namespace) -> None:
    """Raise an error if there are names; with `--allow-nan` note a warning."""
    if names := list(names):
        text = f"NaN or Inf in {what} {listed(names)}"
        if not options.allow_nan:
            raise MXError(f"{text}: mend it, or give --allow-nan to quantize all the same")
        note(f"warning: {text}")


def exported_module(
    loaded: LoadedModel, part: str | None = None, allow_partial: bool = False
) -> tuple[GraphModule, Coverage | None]:
    """Return the graph module of a model's export, and the share of its checkpoint's values that it holds.

    Raises:
        MXError: for a program that leaves out more than `part` and `allow_partial` say, as `Coverage.check` takes them.
    """
    with user_errors("export the model", _FOR_CODE if loaded.values is None else WITHOUT_EXPORT):
        program = loaded.export()
    if loaded.values is None:
        return program.module(), None
    coverage = loaded.values.held_by(tensors_read(program))
    coverage.check(part, allow_partial)
    note_coverage(coverage)
    # a part that is left out is none of the float model that reports count
    return remove_unused(program.module()), coverage


def note_coverage(coverage: Coverage) -> None:
    """Say what a program leaves out of its checkpoint."""
    if coverage.held < coverage.values:
        note(f"the program holds {coverage}")


def _nonfinite_inputs(loaded: LoadedModel, batch: Batch) -> Iterable[str]:
    """Yield the inputs that hold a NaN, or no finite value: a mask may hold -Inf beside others."""
    leaves = pytree.tree_leaves(batch)
    for name, leaf in zip(loaded.signature.names, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            if leaf.isnan().any() or not leaf.isfinite().any():
                yield name
