"""Build a model of transformers without memory for its weights, and with tensors in place of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.checkpoint_files import CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: fields of a configuration, at any depth, that count layers, and those that count experts
_LAYERS = re.compile(
    r"(\w+_)?(num|n|numb_of)_(\w+_)?(layers?|blocks?|stages)|(en|de)coder_layers|(\w+_)?depths?|layers"
)
_EXPERTS = re.compile(r"(\w+_)?(num|n)_(\w+_)?experts")
#: layers and experts that are built without a question
_FEW = 1000


def check_counts(config: Mapping[str, Any], shapes: Collection[tuple[int, ...]], source: str) -> None:
    """Raise an `MXError` for more layers than a checkpoint has tensors, or more experts than its largest dimension.

    Such a model would be built in vain, which takes time and memory whatever the size of the files. `config` is the
    content of config.json, `source` its file, and `shapes` are those of the tensors that the files hold.
    """
    largest = max(map(max, filter(None, shapes)), default=0)
    limits = ((_LAYERS, "tensors", len(shapes)), (_EXPERTS, "tensors and rows", max(len(shapes), largest)))
    for name, value in config.items():
        if isinstance(value, dict):
            check_counts(value, shapes, source)
        for count in value if isinstance(value, list) else [value]:
            for pattern, what, limit in limits:
                # a count that is NaN is not within the limit either
                if isinstance(count, int | float) and pattern.fullmatch(name) and not count <= limit + _FEW:
                    stated = f"{source!r} has {name} {value!r}"
                    raise MXError(f"{stated}, and the files hold {limit} {what}: fetch the checkpoint again")


def _check_sizes(model: PreTrainedModel, shapes: Collection[tuple[int, ...]], source: str) -> None:
    values = 2 * sum(map(math.prod, shapes))
    for name, parameter in model.named_parameters():
        if parameter.numel() > values:
            raise MXError(
                f"{source!r} gives {name} the shape {tuple(parameter.shape)}, and the files hold {values} values at "
                "most: fetch the checkpoint again"
            )


def skeleton_of(config: Any, shapes: Collection[tuple[int, ...]], source: str) -> PreTrainedModel:
    """Return a causal language model on the meta device, in the dtype of its configuration or else bfloat16.

    `shapes` are those of the tensors that the files hold; errors name `source`.
    """
    transformers = import_extra("transformers", "hf")
    with user_errors(f"build the model of {source!r}"), torch.device("meta"):
        dtype = config.dtype or torch.bfloat16
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    _check_sizes(model, shapes, source)
    return model


def with_tensors(
    skeleton: PreTrainedModel, dtype: torch.dtype, tensors: Mapping[str, Tensor], advice: str
) -> PreTrainedModel:
    """Return the model with tensors of a checkpoint, by their names in it."""
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


def model_on_meta(source: Path, config: dict[str, Any], shapes: Collection[tuple[int, ...]]) -> PreTrainedModel:
    """Build the model of a folder with this content of config.json and these shapes of tensors, without its weights."""
    transformers = import_extra("transformers", "hf")
    file = str(source / CONFIG)
    check_counts(config, shapes, file)
    with user_errors(f"build the model of {file!r}"), torch.device("meta"):
        architecture = (config.get("architectures") or [None])[0]
        kind = getattr(transformers, str(architecture), None)
        if kind is None:
            raise MXError(f"{file!r} names the architecture {architecture!r}, which transformers has not")
        model = kind(transformers.AutoConfig.from_pretrained(source, trust_remote_code=False))
    _check_sizes(model, shapes, file)
    return model
