"""Packed weights that a checkpoint holds as the values that their codes stand for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.model_modules import are_experts
from pt2mx.pt2e.checkpoints.packed_uses import Use
from pt2mx.pt2e.checkpoints.selection import as_matrix, holds_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def take_values(
    packed: dict[str, Use], patterns: Sequence[str], model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Take weights out of `packed`, and give their values, as the float model has them.

    Args:
        packed: parameter -> its packed form.
        patterns: regular expressions of modules.
        model: the float model.
        dtype: of the values.

    Raises:
        MXError: for a pattern that is none or matches no such module, and for what cannot be written as values.
    """
    found = {}
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise MXError(f"unpack={patterns!r} must be a list of regular expressions, such as ['.*embed_tokens']")
    for pattern in patterns:
        try:
            names = [name for name in packed if re.fullmatch(pattern, name.rpartition(".")[0])]
        except re.error as error:
            raise MXError(f"unpack: {pattern!r} is no regular expression: {error}") from None
        if not names:
            raise MXError(f"unpack: {pattern!r} is no module with a packed weight, such as {next(iter(packed))}")
        for name in names:
            use = packed.pop(name)
            if use.inputs is not None:
                raise MXError(f"unpack: inputs of {name} are quantized, which a checkpoint says beside codes alone")
            found[name] = _values(name, use, model, dtype)
    return found


def _values(name: str, use: Use, model: PreTrainedModel, dtype: torch.dtype) -> Tensor:
    layer, parameter = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    matrix = as_matrix(layer, parameter)
    *rows, columns = matrix.shape
    known = isinstance(layer, nn.Linear | nn.Embedding) or holds_columns(layer) or are_experts(layer)
    # of a layer that is not known, the shape says whether codes are in the order of its dimensions
    if (*rows,) != use.data.shape[:-1] or (not known and (len(rows) > 1 or rows == [columns])):
        raise MXError(
            f"unpack: {name} of a {type(layer).__name__} cannot be told from its transpose: leave it in high precision "
            "(set_module_name_regex)"
        )
    values = ops.dequantize_mx(use.data, use.scale, use.element, use.block_size, dtype, matrix.dim() - 1, columns)
    return as_matrix(layer, values)
