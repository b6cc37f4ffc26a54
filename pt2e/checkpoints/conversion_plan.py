"""Decide what happens to each tensor of a float checkpoint, from its headers and from a model on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError, listed
from pt2mx.kernels.packing import packed_length
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.pt2e.checkpoints.configs import model_fields, write_config
from pt2mx.pt2e.checkpoints.engines import HEAD, engines_that_load, is_refused
from pt2mx.pt2e.checkpoints.recode import alike_form
from pt2mx.pt2e.checkpoints.select_weights import LayerSpecs, Selection, holds_columns, select_weights
from pt2mx.pt2e.checkpoints.sources import Shards, Source
from pt2mx.pt2e.models.checkpoint_files import CONFIG
from pt2mx.pt2e.models.checkpoint_names import check_compatibility, missing_tensors, no_values, renames_of
from pt2mx.pt2e.models.layouts import Layout, inputs_text
from pt2mx.pt2e.models.module_schemes import (
    EMBEDDING,
    EXPERTS,
    LINEAR,
    Module,
    Scheme,
    are_experts,
    head_of,
    weights_of,
    with_head,
)
from pt2mx.pt2e.models.safetensors_shards import Entry
from pt2mx.pt2e.models.weight_formats import format_of, is_misread, spec_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: tensors to name in an error
_NAMED = 3


@dataclass
class ConversionPlan:
    """The tensors and the configuration to write.

    Args:
        config: the content of config.json.
        shards: the shards to read; the output has shards of the same names.
        chosen: tensor to quantize -> its format.
        transposed: the tensors to quantize that hold (..., in, out).
        parameters: tensor to quantize -> its name in the model.
        left: tensor of two or more dimensions -> the reason why it is not quantized.
        layout: the layout of the output.
        dtype: the dtype of tensors that are not quantized; None: their own.
        quantized_head: True: quantize the head where no engine is known to load it, too.
        changes: what the checkpoint states otherwise than the recipe, a line each.
        engines: what each engine is known to do with it, as `engines_that_load` returns it.
    """

    config: dict[str, Any]
    shards: Shards
    layout: Layout
    dtype: torch.dtype | None = None
    chosen: dict[str, MXSpec] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    parameters: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    quantized_head: bool = False
    changes: list[str] = field(default_factory=list)
    engines: dict[str, str] = field(default_factory=dict)

    @property
    def entries(self) -> dict[str, dict[str, Entry]]:
        """The tensors to read by shard."""
        return self.shards.entries

    def outputs(self, name: str, entry: Entry) -> dict[str, Entry]:
        """Return the tensors to write for a tensor of the source."""
        spec = self.chosen.get(name)
        if spec is None:
            return {name: Entry(self.dtype_of(entry.dtype), entry.shape)}
        return self.entries_of(name, format_of(spec), self.matrix(name, entry.shape))

    def entries_of(self, name: str, form: str, shape: tuple[int, ...]) -> dict[str, Entry]:
        """Return the tensors of a weight (..., N, K) in a format."""
        *rows, columns = shape
        spec, stored = spec_of(form), self.layout.check(name, form)
        blocks, width = columns // spec.block_size, packed_length(columns, spec.element.bits)
        down, across = spec.scale_shape((rows[-1], columns))
        grid = (down, 1, across, 1) if stored.spread_scales else (down, across)
        entries = [
            Entry(stored.dtype, (*rows, blocks, width // blocks) if stored.by_block else (*rows, width)),
            Entry(stored.scale_dtype, (*rows[:-1], *grid)),
        ]
        if stored.tensor_scale:
            entries.append(Entry(torch.float32, stored.tensor_scale_shape))
        return dict(zip(self.layout.names(name, form), entries, strict=True))

    def matrix(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a weight with the dimension that the matmul reduces last."""
        return (*shape[:-2], shape[-1], shape[-2]) if name in self.transposed else shape

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which to write a tensor that is not quantized."""
        return self.dtype if self.dtype is not None and dtype in HIGH_PRECISION else dtype

    def model_dtype(self) -> torch.dtype:
        """Return the dtype in which the model loads."""
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        all_entries = [(name, entry) for entries in self.entries.values() for name, entry in entries.items()]
        stored = next((entry.dtype for name, entry in all_entries if name in self.chosen), torch.bfloat16)
        dtype = self.dtype or getattr(torch, str(stated).removeprefix("torch."), stored)
        return dtype if dtype in HIGH_PRECISION else torch.bfloat16

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Name the dtype of the model in its configuration."""
        self.config["dtype"] = str(dtype).removeprefix("torch.")
        self.config.pop("torch_dtype", None)

    def size(self) -> int:
        """Return the bytes of all tensors to write."""
        return sum(
            written.nbytes
            for entries in self.entries.values()
            for name, entry in entries.items()
            for written in self.outputs(name, entry).values()
        )


def plan_conversion(
    source: Source, quantizer: MXQuantizer, layout: Layout, dtype: torch.dtype | None, quantized_head: bool = False
) -> ConversionPlan:
    """Decide about every tensor of a checkpoint without reading a weight.

    Raises:
        MXError: for a folder that is no float checkpoint of transformers; for a tensor that the layout cannot hold.
    """
    path, config, model, shards, *_ = source
    entries = {name: entry for tensors in shards.entries.values() for name, entry in tensors.items()}
    check_whole(path, model, entries)
    check_values(path, model, entries)
    plan = ConversionPlan(config, shards, layout, dtype, quantized_head=quantized_head)
    modules = with_head(_choose(plan, model, select_weights(model, quantizer)), model)
    check_dtype(plan)
    check_compatibility(layout, modules, model)
    plan.engines = engines_that_load(layout, modules, model)
    plan.config = {**config, "quantization_config": write_config(layout, modules), **model_fields(layout, modules)}
    if dtype is not None:
        plan.set_dtype(dtype)
    return plan


def check_whole(source: Path, model: PreTrainedModel, names: Iterable[str]) -> None:
    """Raise an `MXError` where the files lack a tensor of the model: transformers would draw random values for it."""
    if missing := missing_tensors(model, names):
        raise MXError(
            f"{str(source)!r} lacks {listed(missing, _NAMED)}, which the {type(model).__name__} of its "
            f"{CONFIG} has: fetch the checkpoint again, or name its own architecture in {CONFIG}"
        )


def check_values(source: Path, model: PreTrainedModel, entries: Mapping[str, Entry]) -> None:
    """Raise an `MXError` for tensors that are no values of the model: of another shape, or codes without a scale.

    Args:
        source: the checkpoint.
        model: its model, on any device, also meta.
        entries: the tensors that stand for values.
    """
    rename, state = renames_of(model), model.state_dict()
    for name, entry in entries.items():
        parameter, merged = rename(name)
        if not merged and parameter in state and entry.shape != tuple(state[parameter].shape):
            raise MXError(
                f"the checkpoint has {name} of shape {entry.shape}, its {CONFIG} of {tuple(state[parameter].shape)}: "
                "give files that belong together"
            )
    if codes := no_values(model, {name: entry.dtype for name, entry in entries.items()}):
        raise MXError(
            f"{str(source)!r} holds {codes[0]} in {entries[codes[0]].dtype}, which are codes, and its {CONFIG} says "
            f"that they are values: fetch it again, or name their quantization in {CONFIG}"
        )


def _choose(plan: ConversionPlan, model: PreTrainedModel, selection: Selection) -> dict[str, Module]:
    """Choose a format for each tensor of the checkpoint, or note the reason why it is not quantized.

    Returns:
        The modules that have weights, by their names in the model and in the checkpoint.

    Raises:
        MXError: where the layout lacks a format, or there is nothing to quantize.
    """
    rename, kinds, head = renames_of(model), weights_of(model), head_of(model)
    modules: dict[str, Module] = {}
    for entries in plan.entries.values():
        for name, entry in entries.items():
            parameter, merged = rename(name)
            specs, path = selection.chosen.get(parameter), parameter.rpartition(".")[0]
            scheme, reason = None, selection.left.get(parameter, "no linear layer holds it")
            if specs is not None:
                layer = model.get_submodule(path)
                wanted = specs.activation
                specs = LayerSpecs(_in_layout(specs.weight, plan.layout), _stated(plan.layout, layer, wanted))
                reason = _unfit(plan, layer, name, entry, merged, specs, is_head=path == head)
            if specs is not None and not reason:
                scheme = Scheme(format_of(specs.weight), specs.activation)
                if wanted is not None and wanted != specs.activation:
                    _note_inputs(plan, wanted, specs.activation)
                plan.chosen[name], plan.parameters[name] = specs.weight, parameter
                if holds_columns(layer):
                    plan.transposed.add(name)
            elif len(entry.shape) > 1:
                plan.left[name] = reason
            if parameter in kinds:
                module = Module(kinds[parameter], scheme)
                if modules.setdefault(path, module) != module:
                    raise MXError(f"{plan.layout.name} has one format for each module, and {path} has several weights")
                # in a checkpoint of DeepSeek-V4, other tensors of a module belong to the layer around it
                if module.kind in (LINEAR, EMBEDDING, EXPERTS) or name.endswith(".weight"):
                    modules[name.rpartition(".")[0]] = module
    if not plan.chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(plan.left.items())[:3])
        raise MXError(f"no tensor of the checkpoint would be quantized ({reasons}): give another recipe or layout")
    return {**modules, **{name.rpartition(".")[0]: Module(kind, None) for name, kind in kinds.items()}, **modules}


def _in_layout(spec: MXSpec, layout: Layout) -> MXSpec:
    """Return a spec with the tensor scale as the layout has it: a factor or a divisor."""
    form = alike_form(format_of(spec), layout.stored)
    scale_format = spec.scale_format if form is None else spec_of(form).scale_format
    return spec.replace(scale_format=scale_format) if spec.has_tensor_scale and scale_format.tensor else spec


def _stated(layout: Layout, layer: nn.Module, inputs: MXSpec | None) -> MXSpec | None:
    """Return the spec of inputs that a checkpoint states for a layer that a recipe quantizes to another."""
    return None if inputs is None or are_experts(layer) else layout.as_read(inputs)


def _note_inputs(plan: ConversionPlan, wanted: MXSpec, stated: MXSpec | None) -> None:
    text = "inputs of experts stay in high precision: no layout states their quantization"
    line = text if stated is None else inputs_text(plan.layout, wanted, stated)
    if line not in plan.changes:
        plan.changes.append(line)


def _unfit(
    plan: ConversionPlan,
    layer: nn.Module,
    name: str,
    entry: Entry,
    merged: bool,
    specs: LayerSpecs,
    is_head: bool = False,
) -> str:
    """Return the reason why a tensor of a selected weight is not quantized; "" for none.

    Raises:
        MXError: where the layout lacks its formats.
    """
    layout, form = plan.layout, format_of(specs.weight)
    columns = entry.shape[-2 if holds_columns(layer) else -1]
    if are_experts(layer):
        if merged == layout.only_experts:
            return f"{layout.name} has no place for " + ("experts apart" if merged else "experts in one tensor")
        if form in layout.always_inputs:
            return f"{layout.name} has no weights in {form} with inputs in high precision, which experts have"
    elif merged:
        return "loading merges it with others"
    elif layout.only_experts:
        return f"{layout.name} has experts alone"
    elif type(layer) is not nn.Linear:
        return f"loaders of {layout.name} keep layers of type {type(layer).__name__} in high precision"
    if is_head and not plan.quantized_head and is_refused(layout.name, HEAD, form):
        return f"no engine is known to load a quantized head in {layout.name} (--quantized-head quantizes it)"
    block = spec_of(form).block_size
    if columns % block and specs.weight.block_rows == 1:
        return f"its {columns} columns are no whole blocks of {block}"
    rows = entry.shape[-1 if holds_columns(layer) else -2]
    if specs.weight.block_rows > 1 and is_misread(specs.weight, rows, columns):
        return f"loaders would divide its {rows} x {columns} values into equal blocks"
    if entry.dtype not in HIGH_PRECISION:
        return f"it holds {entry.dtype}"
    layout.check(name, form)
    if specs.activation is not None and specs.activation.has_tensor_scale:
        raise MXError(
            f"inputs of {name} in {specs.activation} need a calibrated tensor scale: take a recipe of weights, or "
            "pt2mx.quantize_language_model and save_checkpoint"
        )
    layout.check_inputs(name, form, specs.activation)
    if specs.weight.block_size != block:
        raise MXError(f"{layout.name} cannot hold {name} in {specs.weight}: its blocks have {block} values")
    return ""


def check_dtype(plan: ConversionPlan) -> None:
    """Raise an `MXError` where the model would load in a dtype in which no library computes the layout."""
    dtype = plan.model_dtype()
    if dtype not in plan.layout.dtypes:
        allowed = ", ".join(str(one).removeprefix("torch.") for one in plan.layout.dtypes)
        raise MXError(
            f"loaders of {plan.layout.name} compute in {allowed}, and the checkpoint is in {dtype}: give the dtype "
            f"{allowed.partition(',')[0]!r} for the tensors that stay"
        )


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the values of a tensor to another dtype.

    Raises:
        MXError: where a finite value becomes Inf.
    """
    if dtype == values.dtype:
        return values
    converted = values.to(dtype)
    lost = converted.isinf() & values.isfinite()
    if bool(lost.any()):
        wide = "give dtype='bfloat16' (--dtype bfloat16), which has the range of float32"
        advice = wide if dtype == torch.float16 else "leave dtype (--dtype) out, which keeps the checkpoint's own"
        raise MXError(f"{name} holds {float(values[lost].abs().max()):.6g}, which is Inf in {dtype}: {advice}")
    return converted
