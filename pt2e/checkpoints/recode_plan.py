"""Decide how the codes of a quantized checkpoint go into another layout, from its headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.configs import model_fields, write_config
from pt2mx.pt2e.checkpoints.conversion_plan import check_dtype, check_values, check_whole
from pt2mx.pt2e.checkpoints.engines import engines_that_load
from pt2mx.pt2e.checkpoints.load import packed_weights
from pt2mx.pt2e.checkpoints.recode import alike_form, tensor_scaled_inputs
from pt2mx.pt2e.checkpoints.recoding import RecodingPlan
from pt2mx.pt2e.checkpoints.regroup import Regrouping, divide
from pt2mx.pt2e.checkpoints.sources import Source
from pt2mx.pt2e.models.checkpoint_files import CONFIG
from pt2mx.pt2e.models.checkpoint_names import Parts, check_compatibility
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.module_schemes import EXPERTS, Module, Scheme, is_transposed, weights_of, with_head
from pt2mx.pt2e.models.safetensors_shards import Entry
from pt2mx.pt2e.models.weight_formats import NVFP4_DIVISOR, format_of, spec_of
from pt2mx.spec import MXSpec, parse

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plan_recoding(
    source: Source, layout: Layout, dtype: torch.dtype | None, weights: str | None = None
) -> RecodingPlan:
    """Decide about every tensor of a quantized checkpoint without reading a weight.

    Args:
        source: the checkpoint, with schemes.
        layout: the new layout.
        dtype: the dtype of tensors in high precision; None: their own.
        weights: the format of weights, as `pt2mx.parse` takes it; None: the most similar one.

    Raises:
        MXError: for formats that have no counterpart in the layout.
    """
    path, config, model, shards, schemes, tensors = source
    if schemes is None:
        raise MXError(f"{path} is in high precision: give a checkpoint that states a quantization")
    plan = RecodingPlan(config, shards, layout, dtype, forms=_forms(layout, weights), source=schemes, tensors=tensors)
    shapes = {name: entry for entries in shards.entries.values() for name, entry in entries.items()}
    modules: dict[str, Module] = {}
    kinds, packed = weights_of(model), packed_weights(model, schemes, tensors)
    for parameter, kind in kinds.items():
        weight, scheme = packed.get(parameter), None
        if weight is not None and layout.only_experts and kind != EXPERTS:
            raise MXError(f"{layout.name} holds experts alone, and the checkpoint codes of {parameter}")
        if weight is not None:
            parts: Parts = weight.parts or {parameter: torch.empty(0)}
            whole = is_transposed(model, parameter)
            if whole and (weight.parts is None) != layout.only_experts:
                experts = _regroup(plan, model, parameter, weight.scheme, shapes)
                parts, scheme = experts.targets, Scheme(experts.new)
            else:
                for part in parts:
                    scheme = _add(plan, part, parameter, weight.scheme, shapes)
            if kind == EXPERTS and not whole and scheme == Scheme(NVFP4_DIVISOR):
                plan.unit_scales |= {part for part in parts if spec_of(weight.scheme.form).has_e8m0_scale}
            for module in (part.rpartition(".")[0] for part in parts):
                modules[module] = Module(kind, scheme, pre_scaled=f"{module}.{schemes.layout.pre_scale}" in shapes)
        if modules.setdefault(parameter.rpartition(".")[0], Module(kind, scheme)).scheme != scheme:
            raise MXError(f"{layout.name} has one format for each module, and {parameter} has another")
    if not plan.chosen:
        raise MXError(f"{str(path)!r} holds no codes of a {type(model).__name__}: name its architecture in {CONFIG}")
    kept = {name: entry for name, entry in shapes.items() if not plan.is_recoded(name)}
    plan.left = {name: "the checkpoint holds its values" for name, entry in kept.items() if len(entry.shape) > 1}
    names = {*kept, *(weight for weight, *_ in plan.weights.values())}
    for parameter in (name for name in packed if is_transposed(model, name)):
        bias = divide(model, f"{parameter}_bias", into_one=True)
        is_there = bias.name in shapes or shapes.keys() >= bias.sources.keys()
        names |= {parameter, bias.name} if is_there else {parameter}
    check_whole(path, model, names)
    check_values(path, model, kept)
    check_dtype(plan)
    check_compatibility(layout, modules, model)
    others = {name.rpartition(".")[0]: Module(kind, None) for name, kind in kinds.items()}
    modules = with_head({**others, **modules}, model)
    plan.engines = engines_that_load(layout, modules, model, bool(plan.unit_scales))
    quantization = write_config(layout, modules)
    fields = {name: value for name, value in config.items() if name not in ("quantization_config", "expert_dtype")}
    plan.config = {**fields, "quantization_config": quantization, **model_fields(layout, modules)}
    if dtype is not None:
        plan.set_dtype(dtype)
    return plan


def _forms(layout: Layout, weights: str | None) -> list[str]:
    """Return the formats of a layout that are the given one, apart from the tensor scale; None: all.

    Raises:
        MXError: where it has none.
    """
    if weights is None:
        return list(layout.stored)
    wanted = parse(weights)
    block = wanted.element, wanted.block_size, wanted.block_rows
    specs = {form: spec_of(form) for form in layout.stored}
    forms = [form for form, one in specs.items() if (one.element, one.block_size, one.block_rows) == block]
    if not forms:
        raise MXError(f"{layout.name} has no weights in {weights}: it has {', '.join(layout.stored)}")
    return forms


def _add(plan: RecodingPlan, part: str, parameter: str, scheme: Scheme, shapes: dict[str, Entry]) -> Scheme:
    """Note how a tensor of codes is written; return its new scheme."""
    old, new = plan.source.layout, plan.layout
    form = _new_form(plan, part, scheme.form, shapes)
    codes, *scales = old.stored_names(part, scheme.form, shapes)
    plan.weights[codes] = part, scheme.form, form
    plan.written_with_others |= set(scales)
    plan.chosen[codes], plan.parameters[codes] = spec_of(form), parameter
    module = part.rpartition(".")[0]
    if old.pre_scale and f"{module}.{old.pre_scale}" in shapes and old.pre_scale != new.pre_scale:
        raise MXError(f"{module}.{old.pre_scale} multiplies inputs, which {new.name} has no place for")
    inputs = scheme.inputs
    if inputs is not None and inputs.has_tensor_scale:
        inputs = _inputs(plan, module, inputs, shapes)
    new.check_inputs(module, form, inputs)
    return Scheme(form, inputs)


def _new_form(plan: RecodingPlan, part: str, form: str, shapes: Mapping[str, Entry]) -> str:
    """Return the format of the new layout with the values of a weight.

    Raises:
        MXError: where it has none, and where the checkpoint lacks a tensor of the weight.
    """
    old, new = plan.source.layout, plan.layout
    names = old.stored_names(part, form, shapes)
    if missing := [name for name in names if name not in shapes]:
        raise MXError(f"the checkpoint holds no {missing[0]}, which {old.name} has for {part} in {form}")
    headers = {name: torch.empty(shapes[name].shape, dtype=shapes[name].dtype, device="meta") for name in names}
    stated = format_of(old.spec_in(part, form, headers, plan.source.block))
    new_form = alike_form(stated, plan.forms)
    if new_form is None:
        new.check(part, stated)
        raise MXError(f"{part} in {stated} has no equal in {', '.join(plan.forms)} of {new.name}")
    return new_form


def _regroup(
    plan: RecodingPlan, model: PreTrainedModel, parameter: str, scheme: Scheme, shapes: Mapping[str, Entry]
) -> Regrouping:
    """Note how a weight of gpt-oss's experts, and its bias, go into linear layers, or back."""
    if scheme.inputs is not None:
        raise MXError(f"{plan.layout.name} quantizes no inputs of {parameter}: give a checkpoint of weights alone")
    weight = divide(model, parameter, plan.layout.only_experts)
    form = _new_form(plan, next(iter(weight.sources)), scheme.form, shapes)
    weight = dataclasses.replace(weight, form=scheme.form, new=form)
    names = [plan.source.layout.stored_names(part, scheme.form, shapes) for part in weight.sources]
    (codes, *_), *_ = names
    plan.chosen[codes], plan.parameters[codes] = spec_of(form), parameter
    bias = divide(model, f"{parameter}_bias", plan.layout.only_experts)
    for regrouping, tensors in ((weight, [name for one in names for name in one]), (bias, list(bias.sources))):
        if missing := [name for name in tensors if name not in shapes]:
            raise MXError(f"the checkpoint holds no {missing[0]}, a part of {regrouping.name}")
        plan.regroupings[tensors[0]] = regrouping
        plan.written_with_others |= set(tensors[1:])
    return weight


def _inputs(plan: RecodingPlan, module: str, inputs: MXSpec, shapes: dict[str, Entry]) -> MXSpec:
    """Note how the tensor scale of inputs is written; return their spec in the new layout."""
    old, new = plan.source.layout, plan.layout
    stated = tensor_scaled_inputs(inputs, new)
    name = f"{module}.{old.input_scale}"
    if stated is None or name not in shapes:
        missing = f"the checkpoint holds no {name}" if stated else f"{new.name} has no place for {name}"
        raise MXError(f"{missing}, the tensor scale of inputs")
    changes = stated.divides_by_tensor_scale != inputs.divides_by_tensor_scale
    shape = new.stored[format_of(stated)].tensor_scale_shape
    plan.input_scales[name] = f"{module}.{new.input_scale}", changes, shape
    return stated
