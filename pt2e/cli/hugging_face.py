"""Load models from checkpoints of Hugging Face."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.checkpoint_files import files_of, sizes_in
from pt2mx.pt2e.checkpoints.coverage import CheckpointValues
from pt2mx.pt2e.user_errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_checkpoint(name: str, dtype: str | None = None) -> PreTrainedModel:
    """Load the model of a checkpoint, ready for export.

    Args:
        name: a local folder, or a name on the hub.
        dtype: the dtype to load it in, such as "bfloat16"; None: its own.

    Raises:
        MXError: for a checkpoint that cannot be loaded, or that needs code of its own.
    """
    transformers = import_extra("transformers", "hf")
    try:
        fields, _ = transformers.PretrainedConfig.get_config_dict(name)
        architecture = (fields.get("architectures") or ["AutoModel"])[0]
        module = from_pretrained(getattr(transformers, architecture, transformers.AutoModel), name, dtype)
    except MXError:
        raise
    except Exception as error:  # any of the libraries that read a checkpoint may raise anything
        raise MXError(
            f"{name!r} is no Hugging Face checkpoint that can be loaded (a local folder works offline): "
            f"{one_line(error)}"
        ) from None
    # a program without transformers' output types loads where transformers is not installed
    module.register_forward_hook(lambda module, inputs, output: output.to_tuple())
    for config in [part.config for part in module.modules() if hasattr(getattr(part, "config", None), "use_cache")]:
        config.use_cache = False  # a cache is no tensor, and export takes tensors
    return module


def from_pretrained(
    architecture: type[PreTrainedModel], name: str | os.PathLike[str], dtype: str | None = None
) -> PreTrainedModel:
    """Return `architecture.from_pretrained(name)` in evaluation mode, without a progress bar.

    With dtype=None it keeps its own dtype.

    Raises:
        MXError: for a checkpoint that needs code of its own, which pt2mx never runs.
    """
    from transformers.utils import logging

    _refuse_remote_code(name)
    logging.disable_progress_bar()
    return architecture.from_pretrained(name, dtype=dtype or "auto", trust_remote_code=False).eval()


def checkpoint_values(model: PreTrainedModel, name: str | os.PathLike[str]) -> CheckpointValues:
    """Return the values of the checkpoint from which a model was loaded; without files on disk, the values of the
    model."""
    return CheckpointValues(model, sizes_in(files_of(name)) or None)


def _refuse_remote_code(name: str | os.PathLike[str]) -> None:
    """Raise an `MXError` where transformers itself lacks the model."""
    transformers = import_extra("transformers", "hf")
    fields, _ = transformers.PretrainedConfig.get_config_dict(name)
    remote = fields.get("auto_map")
    known = fields.get("model_type") in transformers.CONFIG_MAPPING
    if remote and not (known and all(hasattr(transformers, name) for name in fields.get("architectures") or ())):
        files = sorted({f"{reference.rpartition('.')[0]}.py" for reference in remote.values()})
        raise MXError(
            f"{str(name)!r} needs code of its own, which is not run: {', '.join(files)}. Where you trust it, give "
            "--model module.py:factory, a function that loads the model with trust_remote_code=True and returns "
            "(model, example_inputs)"
        )
