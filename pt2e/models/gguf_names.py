"""The tensors of a GGUF file that hold the tensors of a model, by the tables of llama.cpp's package `gguf`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.checkpoint_names import linear_parts, parts_of
from pt2mx.pt2e.models.gguf_model import ARCHITECTURES
from pt2mx.pt2e.models.module_schemes import is_transposed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: one of several experts, with its number
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROTATED = re.compile(r"\.attn_([qk])\.")


@dataclass(frozen=True)
class Source:
    """The location of a tensor in a GGUF file.

    Args:
        name: the tensor of the file.
        parameter: the parameter of the model that the tensor is, or is a part of.
        shape: the shape of the part.
        expert: its index along the first dimension; None: the tensor itself.
        rows: row i of the model is row `rows[i]` of the file; None: the same order.
        offset: what the file adds to the values.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: Tensor | None = None
    offset: float = 0.0

    @property
    def scales(self) -> tuple[str, str]:
        """The tensors of the file with scales of whole tensors, (1,) or (E,) float32: of the tensor, and of inputs.

        llama.cpp has them for NVFP4, and may leave them out."""
        stem = self.name.rpartition(".")[0]
        return f"{stem}.scale", f"{stem}.input_scale"

    def read(self, tensor: Tensor) -> Tensor:
        """Return the rows of the model, of values, codes or scales of the file's tensor."""
        part = tensor if self.expert is None else tensor[self.expert]
        return part if self.rows is None else part[self.rows]

    def order(self, part: Tensor) -> Tensor:
        """Return rows of the model in the file's order, the inverse of `read` for one expert."""
        return part if self.rows is None else torch.empty_like(part).index_copy_(0, self.rows, part)


def sources_of(model: PreTrainedModel, architecture: str, untied: bool = False) -> dict[str, Source]:
    """Return tensor of a checkpoint of transformers -> where a GGUF file of an architecture holds it.

    Tied weights are there once; with `untied` under each of their names. The model may be on the meta device.
    """
    gguf, config = import_extra("gguf", "gguf"), model.config.get_text_config()
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    row, tied = ARCHITECTURES[architecture], model.all_tied_weights_keys or {}
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    sources = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in tied and not untied:
            continue
        transposed, shape = is_transposed(model, name), tuple(parameter.shape)
        parts = linear_parts(model, name) if transposed else parts_of(model, [name])[name]
        columns = shape[1:-1] if transposed else shape[-1:]  # of transposed experts (E, K, N), or of their bias (E, N)
        for part, part_rows in parts.items():
            expert = _EXPERT.search(part)
            whole = _EXPERT.sub(".experts.", part)
            stem, _, suffix = whole.rpartition(".")
            stored = table.get_name(stem)
            if not stored:  # a parameter that no layer has alone is called a weight there
                stored, suffix = table.get_name(whole), "weight"
            if stored is None:
                raise MXError(f"gguf has no name for {name} in models of the architecture {architecture!r}")
            stored, rows = f"{stored}.{suffix}", None
            of_part = (len(part_rows), *columns) if transposed or len(shape) > 1 else shape
            if row.permuted and (kind := _ROTATED.search(stored)):
                if of_part[0] % (2 * heads[kind[1]]):
                    raise MXError(f"{name} has {of_part[0]} rows, no pairs of rows for each of {heads[kind[1]]} heads")
                rows = torch.arange(of_part[0]).view(heads[kind[1]], -1, 2).transpose(1, 2).flatten()
            offset = row.norm_offset if stored.endswith("norm.weight") else 0.0
            sources[part] = Source(stored, name, of_part, None if expert is None else int(expert[1]), rows, offset)
    return sources
