"""Decide how the codes of a quantized checkpoint go into another layout, from its headers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.checkpoint_files import (
    CONFIG,
    CheckpointTensors,
    headers_of,
    quantization_of,
    read_json,
)
from pt2mx.pt2e.checkpoints.checkpoint_names import check_compatibility
from pt2mx.pt2e.checkpoints.configs import model_fields, read_config, write_config
from pt2mx.pt2e.checkpoints.conversion_plan import ConversionPlan, check_dtype, check_whole, model_on_meta
from pt2mx.pt2e.checkpoints.layouts import Layout
from pt2mx.pt2e.checkpoints.load import packed_weights
from pt2mx.pt2e.checkpoints.module_schemes import EXPERTS, Module, Scheme, Schemes, weights_of
from pt2mx.pt2e.checkpoints.recode import alike_form, recode
from pt2mx.pt2e.checkpoints.safetensors_shards import Entry
from pt2mx.pt2e.checkpoints.weight_formats import format_of, read_tensor_scale, spec_of
from pt2mx.spec import MXSpec


@dataclass
class RecodingPlan(ConversionPlan):
    """A plan that keeps the codes of a quantized checkpoint.

    Args:
        source: the schemes of the checkpoint.
        tensors: its tensors.
        weights: tensor of codes -> the weight, its format, and the new one.
        scales: tensors of scales, which are written with the codes.
        input_scales: tensor scale of inputs -> its new name, and whether it becomes its reciprocal.
    """

    source: Schemes | None = None
    tensors: CheckpointTensors | None = None
    weights: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    scales: set[str] = field(default_factory=set)
    input_scales: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def outputs(self, name: str, entry: Entry) -> dict[str, Entry]:
        if name in self.scales:
            return {}
        if name in self.input_scales:
            return {self.input_scales[name][0]: entry}
        if name not in self.weights:
            return super().outputs(name, entry)
        weight, form, new = self.weights[name]
        assert self.source is not None
        shape = entry.shape
        if self.source.layout.stored[form].by_block:
            shape = (*shape[:-2], shape[-2] * shape[-1])
        bits = spec_of(new).element.bits
        return self.entries_of(weight, new, (*shape[:-1], shape[-1] * 8 // bits))

    @property
    def recodings(self) -> set[str]:
        """The tensors that `recoded` converts, or that are written with others."""
        return {*self.weights, *self.scales, *self.input_scales}

    def recoded(self, name: str) -> dict[str, Tensor]:
        """Return the tensors to write for codes, or for the tensor scale of inputs; none for other scales."""
        assert self.source is not None and self.tensors is not None
        if name in self.scales:
            return {}
        if name in self.input_scales:
            new_name, is_reciprocal = self.input_scales[name]
            scale = self.tensors[name]
            value = read_tensor_scale(name, scale)
            return {new_name: (value.reciprocal() if is_reciprocal else value).reshape(scale.shape)}
        weight, form, new = self.weights[name]
        packed = self.source.layout.from_tensors(weight, form, self.tensors, self.source.block)
        packed = recode(weight, packed, new, self.model_dtype())
        return self.layout.to_tensors(weight, new, packed.data, packed.scale, packed.tensor_scale)


def plan_recoding(source: Path, layout: Layout, dtype: torch.dtype | None) -> RecodingPlan:
    """Decide about every tensor of a quantized checkpoint without reading a weight.

    Raises:
        MXError: for formats that have no counterpart in the layout.
    """
    config, schemes = read_json(source / CONFIG), read_config(quantization_of(source) or {})
    headers, tensors = headers_of(source), CheckpointTensors(source)
    model = model_on_meta(source, {**config, "quantization_config": None})
    entries = {shard: header.entries for shard, header in headers.items()}
    plan = RecodingPlan(
        config,
        entries,
        {shard: header.metadata for shard, header in headers.items()},
        layout,
        dtype,
        source=schemes,
        tensors=tensors,
    )
    shapes = {name: entry for header in headers.values() for name, entry in header.entries.items()}
    modules: dict[str, Module] = {}
    kinds, packed = weights_of(model), packed_weights(model, schemes, tensors)
    for parameter, kind in kinds.items():
        weight, scheme = packed.get(parameter), None
        if weight is not None and layout.only_experts and kind != EXPERTS:
            raise MXError(f"{layout.name} holds experts alone, and the checkpoint codes of {parameter}")
        if weight is not None:
            for part in weight.parts or (parameter,):
                scheme = _add(plan, part, parameter, weight.scheme, shapes)
                modules[part.rpartition(".")[0]] = Module(kind, scheme)
        if modules.setdefault(parameter.rpartition(".")[0], Module(kind, scheme)).scheme != scheme:
            raise MXError(f"{layout.name} has one format for each module, and {parameter} has another")
    if not plan.chosen:
        raise MXError(f"{str(source)!r} holds no codes of a {type(model).__name__}: name its architecture in {CONFIG}")
    written = plan.recodings
    plan.left = {name: "the checkpoint holds its values" for name, entry in shapes.items()
                 if name not in written and len(entry.shape) > 1}  # fmt: skip
    check_whole(source, model, [*(shapes.keys() - written), *(weight for weight, *_ in plan.weights.values())])
    check_dtype(plan)
    check_compatibility(layout, modules, model)
    others = {name.rpartition(".")[0]: Module(kind, None) for name, kind in kinds.items()}
    quantization = write_config(layout, {**others, **modules})
    fields = {name: value for name, value in config.items() if name not in ("quantization_config", "expert_dtype")}
    plan.config = {**fields, "quantization_config": quantization, **model_fields(layout, modules)}
    if dtype is not None:
        plan.set_dtype(dtype)
    return plan


def _add(plan: RecodingPlan, part: str, parameter: str, scheme: Scheme, shapes: dict[str, Entry]) -> Scheme:
    """Note how a tensor of codes is written; return its new scheme."""
    assert plan.source is not None
    old, new = plan.source.layout, plan.layout
    headers = {name: torch.empty(shapes[name].shape, dtype=shapes[name].dtype, device="meta")
               for name in old.stored_names(part, scheme.form, shapes) if name in shapes}  # fmt: skip
    spec = old.spec_in(part, scheme.form, headers, plan.source.block)
    form = alike_form(format_of(spec), new.stored)
    if form is None:
        new.check(part, format_of(spec))
    assert form is not None
    codes, *scales = old.stored_names(part, scheme.form, shapes)
    plan.weights[codes] = part, scheme.form, form
    plan.scales |= set(scales)
    plan.chosen[codes], plan.parameters[codes] = spec_of(form), parameter
    module = part.rpartition(".")[0]
    if old.pre_scale and f"{module}.{old.pre_scale}" in shapes and old.pre_scale != new.pre_scale:
        raise MXError(f"{module}.{old.pre_scale} multiplies inputs, which {new.name} has no place for")
    inputs = scheme.inputs
    if inputs is not None and inputs.scale_format.tensor:
        inputs = _inputs(plan, module, inputs, shapes)
    new.check_inputs(module, form, inputs)
    return Scheme(form, inputs)


def _inputs(plan: RecodingPlan, module: str, inputs: MXSpec, shapes: dict[str, Entry]) -> MXSpec:
    """Note how the tensor scale of inputs is written; return their spec in the new layout."""
    assert plan.source is not None
    old, new = plan.source.layout, plan.layout
    form = alike_form(format_of(inputs), [one for one in new.inputs if spec_of(one).scale_format.tensor])
    name = f"{module}.{old.input_scale}"
    if form is None or name not in shapes:
        missing = f"the checkpoint holds no {name}" if form else f"{new.name} has no place for {name}"
        raise MXError(f"{missing}, the tensor scale of inputs")
    changes = spec_of(form).scale_format.tensor != inputs.scale_format.tensor
    plan.input_scales[name] = f"{module}.{new.input_scale}", changes
    return spec_of(form).replace(scale_mode=new.inputs[form][0])
