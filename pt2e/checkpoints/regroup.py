"""Rewrite the experts of gpt-oss, one tensor a weight, as linear layers of their own, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.pt2e.checkpoints.merge_parts import merge
from pt2mx.pt2e.checkpoints.recode import recode
from pt2mx.pt2e.models.checkpoint_files import StoredTensors
from pt2mx.pt2e.models.checkpoint_names import Parts, linear_parts
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.module_schemes import Schemes
from pt2mx.pt2e.models.weight_formats import PackedTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Regrouping:
    """A weight or a bias of experts that two checkpoints divide into different tensors.

    Args:
        name: the parameter, (experts, N, K), or (experts, N) for a bias. It counts as experts * N rows.
        experts: the number of experts.
        sources, targets: its parts in the old and in the new checkpoint.
        form, new: the formats of a weight; "" for a bias.
    """

    name: str
    experts: int
    sources: Parts
    targets: Parts
    form: str = ""
    new: str = ""

    @property
    def rows(self) -> int:
        """The rows of one expert."""
        return sum(rows.numel() for rows in self.sources.values()) // self.experts

    def weights(
        self,
        schemes: Schemes,
        tensors: StoredTensors,
        layout: Layout,
        dtype: torch.dtype,
        only: str | None = None,
    ) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the codes and scales to write for a weight, expert by expert.

        Args:
            schemes, tensors: the old checkpoint.
            layout: the layout of the new one.
            dtype: the dtype of the model.
            only: the only target to write; None: all.

        Yields:
            The name of a tensor, the index of its first row to write, and the rows.
        """
        experts = range(self.experts) if only is None else (int(self.targets[only][0]) // self.rows,)
        for expert in experts:
            parts = (
                (recode(part, self._read(part, expert, schemes, tensors), self.new, dtype), rows)
                for part, rows in self._of(self.sources, expert)
            )
            packed = merge(self.name, torch.Size([self.rows]), parts)
            for part, rows in self._of(self.targets, expert):
                if only not in (None, part):
                    continue
                written = layout.to_tensors(part, self.new, packed.data[rows], packed.scale[rows], packed.tensor_scale)
                for name, values in written.items():
                    yield (name, expert, values[None]) if part == self.name else (name, 0, values)

    def bias(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to write for a bias."""
        first = tensors[next(iter(self.sources))]
        values = torch.empty(self.experts * self.rows, dtype=first.dtype)
        for part, rows in self.sources.items():
            values[rows] = tensors[part].flatten()
        return {
            part: values[rows].view(self.experts, -1) if part == self.name else values[rows]
            for part, rows in self.targets.items()
        }

    def _of(self, parts: Parts, expert: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of an expert, each with its rows of it."""
        first = expert * self.rows
        for part, rows in parts.items():
            if part == self.name:
                yield part, torch.arange(self.rows)
            elif first <= int(rows[0]) < first + self.rows:
                yield part, rows - first

    def _read(self, part: str, expert: int, schemes: Schemes, tensors: StoredTensors) -> PackedTensors:
        names = schemes.layout.stored_names(part, self.form, tensors)
        read = {
            name: tensors.rows(name, expert, 1)[0] if part == self.name else tensors[name]
            for name in names
            if name in tensors
        }
        return schemes.layout.from_tensors(part, self.form, read, schemes.block)


def divide(model: PreTrainedModel, name: str, into_one: bool) -> Regrouping:
    """Return how a weight or a bias of gpt-oss's experts goes into linear layers, or with `into_one` back."""
    layers, shape = linear_parts(model, name), model.get_parameter(name).shape
    whole = {name: torch.arange(shape[0] * shape[-1])}
    return Regrouping(name, shape[0], *((layers, whole) if into_one else (whole, layers)))
