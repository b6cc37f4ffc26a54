"""Build a model of transformers without memory for its weights, and with tensors in place of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.checkpoint_files import CONFIG
from pt2mx.pt2e.user_errors import user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def skeleton_of(config: Any, source: str) -> PreTrainedModel:
    """Return a causal language model on the meta device, in the dtype of its configuration or else bfloat16.

    Args:
        config: transformers' configuration.
        source: the file of the configuration, for errors.
    """
    transformers = import_extra("transformers", "hf")
    with user_errors(f"build the model of {source!r}"), torch.device("meta"):
        dtype = config.dtype or torch.bfloat16
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def with_tensors(
    skeleton: PreTrainedModel, dtype: torch.dtype, tensors: Mapping[str, Tensor], advice: str
) -> PreTrainedModel:
    """Return the model with tensors of a checkpoint, by their names in it.

    Raises:
        MXError: where a tensor is missing, unknown, or of another shape.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    with user_errors("load the tensors in high precision"):
        model, info = type(skeleton).from_pretrained(
            None, config=skeleton.config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True
        )
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info[problem]:
            names = ", ".join(sorted(map(str, info[problem]))[:3])
            raise MXError(f"{problem.replace('_', ' ')} of the checkpoint: {names}; {advice}")
    return model.eval()


def model_on_meta(source: Path, config: dict[str, Any]) -> PreTrainedModel:
    """Build the model without its weights.

    Raises:
        MXError: where transformers lacks it.
    """
    transformers = import_extra("transformers", "hf")
    architecture = (config.get("architectures") or [None])[0]
    with user_errors(f"build the model of {str(source / CONFIG)!r}"), torch.device("meta"):
        kind = getattr(transformers, str(architecture), None)
        if kind is None:
            raise MXError(
                f"{str(source / CONFIG)!r} names the architecture {architecture!r}, which transformers has not"
            )
        return kind(transformers.AutoConfig.from_pretrained(source, trust_remote_code=False))
