"""The plan of a conversion that keeps the codes of a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.conversion_plan import ConversionPlan, cast
from pt2mx.pt2e.checkpoints.recode import recode, shared_factor
from pt2mx.pt2e.checkpoints.regroup import Regrouping
from pt2mx.pt2e.models.checkpoint_files import StoredTensors
from pt2mx.pt2e.models.checkpoint_names import fused_with
from pt2mx.pt2e.models.module_schemes import Schemes
from pt2mx.pt2e.models.safetensors_shards import Entry
from pt2mx.pt2e.models.weight_formats import PackedTensors, read_tensor_scale, spec_of


@dataclass
class RecodingPlan(ConversionPlan):
    """A plan that keeps the codes of a quantized checkpoint.

    Args:
        forms: the formats of the layout that weights may have.
        source: the schemes of the checkpoint.
        tensors: its tensors.
        weights: tensor of codes -> the weight, its format, and the new one.
        regroupings: first tensor of experts, or of their biases, that the two checkpoints divide differently.
        written_with_others: tensors, such as scales, that are written with codes.
        input_scales: tensor scale of inputs -> its new name, whether it becomes its reciprocal, and its new shape.
        unit_scales: weights whose tensor scale must be 1, because transformers would leave it out.
    """

    forms: list[str] = field(default_factory=list)
    source: Schemes = field(kw_only=True)
    tensors: StoredTensors = field(kw_only=True)
    weights: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    regroupings: dict[str, Regrouping] = field(default_factory=dict)
    written_with_others: set[str] = field(default_factory=set)
    input_scales: dict[str, tuple[str, bool, tuple[int, ...]]] = field(default_factory=dict)
    unit_scales: set[str] = field(default_factory=set)
    _factors: dict[str, Tensor] = field(default_factory=dict)

    def outputs(self, name: str, entry: Entry) -> dict[str, Entry]:
        if name in self.written_with_others:
            return {}
        if name in self.regroupings:
            return self._regrouped_outputs(self.regroupings[name], entry)
        if name in self.input_scales:
            new_name, _, shape = self.input_scales[name]
            return {new_name: Entry(entry.dtype, shape)}
        if name not in self.weights:
            return super().outputs(name, entry)
        weight, form, new = self.weights[name]
        *rows, _ = entry.shape
        return self.entries_of(weight, new, (*rows, self._columns(form, entry)))

    def _columns(self, form: str, entry: Entry) -> int:
        """Return the columns of a weight from its codes."""
        by_block = self.source.layout.stored[form].by_block
        width = entry.shape[-1] * (entry.shape[-2] if by_block else 1)
        return width * 8 // spec_of(form).element.bits

    def _regrouped_outputs(self, experts: Regrouping, entry: Entry) -> dict[str, Entry]:
        shapes = {
            part: (experts.experts, experts.rows) if part == experts.name else (rows.numel(),)
            for part, rows in experts.targets.items()
        }
        if not experts.form:
            return {part: Entry(self.dtype_of(entry.dtype), shape) for part, shape in shapes.items()}
        columns = self._columns(experts.form, entry)
        entries = (self.entries_of(part, experts.new, (*shape, columns)) for part, shape in shapes.items())
        return {name: written for one in entries for name, written in one.items()}

    def is_recoded(self, name: str) -> bool:
        """Return True for a tensor that `recoded` converts, or that is written with others."""
        return any(name in one for one in (self.weights, self.regroupings, self.written_with_others, self.input_scales))

    def recoded(self, name: str, part: str | None = None) -> Iterator[tuple[str, int, Tensor]]:
        """Yield what to write for codes, for a bias of experts, or for the tensor scale of inputs.

        Args:
            name: the tensor.
            part: of experts that are divided differently, the only part to write; None: all.

        Yields:
            The name of a tensor, the index of its first row to write, and the rows.
        """
        if name in self.written_with_others:
            return
        if name in self.regroupings:
            experts = self.regroupings[name]
            if experts.form:
                yield from experts.weights(self.source, self.tensors, self.layout, self.model_dtype(), part)
            else:
                for part, values in experts.bias(self.tensors).items():
                    yield part, 0, cast(part, values, self.dtype_of(values.dtype))
            return
        if name in self.input_scales:
            new_name, is_reciprocal, shape = self.input_scales[name]
            value = read_tensor_scale(name, self.tensors[name])
            yield new_name, 0, (value.reciprocal() if is_reciprocal else value).reshape(shape)
            return
        weight, _, new = self.weights[name]
        packed = recode(weight, self._read(name), new, self.model_dtype(), self._factor(name))
        for written, values in self.layout.to_tensors(
            weight, new, packed.data, packed.scale, packed.tensor_scale
        ).items():
            yield written, 0, values

    def _read(self, codes: str) -> PackedTensors:
        weight, form, _ = self.weights[codes]
        return self.source.layout.from_tensors(weight, form, self.tensors, self.source.block)

    def _factor(self, codes: str) -> Tensor | None:
        """Return the tensor scale for E8M0 scales that become NVFP4's: the largest of the layers that libraries fuse.

        Returns:
            () float32, a power of two; None for other conversions.
        """
        weight, form, new = self.weights[codes]
        if not (spec_of(form).has_e8m0_scale and spec_of(new).has_tensor_scale):
            return None
        if weight in self.unit_scales:
            return torch.ones(())
        if weight not in self._factors:
            all_codes = {name: codes for codes, (name, *_) in self.weights.items()}
            fused = fused_with(weight, all_codes)
            factor = shared_factor({one: self._read(all_codes[one]) for one in fused}, new)
            if factor is None:
                raise MXError(f"{', '.join(fused)} have scales of several formats, which {new} cannot share")
            self._factors.update(dict.fromkeys(fused, factor))  # another thread would compute the same
        return self._factors[weight]
