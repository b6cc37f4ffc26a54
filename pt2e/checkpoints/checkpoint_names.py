"""The names of a model's tensors in its checkpoint: transformers renames some, and merges experts, when it loads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.model_modules import is_transposed, tied_names, weights_of
from pt2mx.pt2e.checkpoints.schemes import EXPERTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def parts_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The tensors of the checkpoint that parameters are made of.

    Args:
        model: on any device, also without memory.
        names: of parameters (..., N, K).

    Returns:
        name -> {name in the checkpoint: the rows of it in the parameter, as (..., N, K) is read as rows of K}.

    Raises:
        MXError: where the parameter holds them in another order than row by row.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found = {}
    for name in names:
        shape = model.get_parameter(name).shape[:-1]
        # of the numbers of rows transformers makes what it makes of the rows; two columns, so that none is squeezed
        rows = torch.arange(shape.numel()).view(*shape, 1).expand(*shape, 2)
        parts = revert_weight_conversion(model, {name: rows})
        if any(part.shape[-1] != 2 or not part[..., 0].equal(part[..., 1]) for part in parts.values()):
            raise MXError(f"the checkpoint has {name} in another order than rows: it cannot be quantized there")
        found[name] = {own: part[..., 0].flatten() for own, part in parts.items()}
    return found


def experts_in_one_tensor(model: PreTrainedModel) -> set[str]:
    """The modules of experts whose weights are one tensor each in the checkpoint, too.

    Args:
        model: on any device, also without memory.
    """
    experts = [name for name, kind in weights_of(model).items() if kind == EXPERTS]
    whole = (name for name in experts if is_transposed(model, name) or len(parts_of(model, [name])[name]) == 1)
    return {name.rpartition(".")[0] for name in whole}


def renames_of(model: PreTrainedModel) -> Callable[[str], tuple[str, bool]]:
    """Return the function: tensor of a checkpoint -> its name in the model, as transformers renames it when it loads,
    and True where it is merged with others there.

    Args:
        model: on any device, also without memory.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings = [one for one in mapping if not isinstance(one, WeightConverter)]

    def rename(name: str) -> tuple[str, bool]:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name in state:
            return name, False
        return renamed, pattern is not None

    return rename


def missing_tensors(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the tensors that the parameters of a model need and a checkpoint lacks. One name of a tied parameter is
    enough; those that transformers says it makes itself are not missing.

    Args:
        model: on any device, also without memory.
        names: of the checkpoint's tensors.

    Returns:
        Their names, as transformers writes them into a checkpoint.
    """
    from transformers.core_model_loading import revert_weight_conversion

    rename, tied = renames_of(model), tied_names(model)
    made: dict[str, set[str]] = defaultdict(set)
    merged = set()
    for name in names:
        parameter, is_merged = rename(name)
        made[parameter].add(name)
        merged |= {parameter} if is_merged else set()
    own = model._keys_to_ignore_on_load_missing or ()
    missing: list[str] = []
    for name, parameter in model.named_parameters():
        held = made.keys() & {name, *tied.get(name, ())}
        if name not in merged if held else any(re.search(pattern, name) for pattern in own):
            continue
        parts, there = set(revert_weight_conversion(model, {name: parameter})), made.get(name, set())
        if not held or parts & there:  # a checkpoint of an older form has the parts by other names
            missing += sorted(parts - there)
    return missing
