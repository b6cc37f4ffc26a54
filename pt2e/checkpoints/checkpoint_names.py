"""The names of a model's tensors in its checkpoint: transformers renames some, and merges experts, when it loads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.model_modules import is_transposed, weights_of
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
