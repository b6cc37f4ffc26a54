"""The fate of each tensor of a float checkpoint, decided from its headers and from a model on the meta device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.kernels.packing import packed_length
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.pt2e.checkpoints.checkpoint_files import CONFIG, headers_of, quantization_of, read_json
from pt2mx.pt2e.checkpoints.checkpoint_names import missing_tensors, renames_of
from pt2mx.pt2e.checkpoints.configs import write_config
from pt2mx.pt2e.checkpoints.layouts import BLOCK, Layout
from pt2mx.pt2e.checkpoints.model_modules import are_experts, weights_of
from pt2mx.pt2e.checkpoints.readers import check_readers
from pt2mx.pt2e.checkpoints.safetensors_shards import Entry
from pt2mx.pt2e.checkpoints.schemes import Module, Scheme
from pt2mx.pt2e.checkpoints.selection import LayerSpecs, Selection, holds_columns, select_weights
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.user_errors import user_errors
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: tensors that an error names
_NAMED = 3


@dataclass
class ConversionPlan:
    """The tensors and the configuration that are written.

    Args:
        config: the content of config.json.
        entries: shard -> the tensors that are read from it; the output has shards of the same names.
        metadata: shard -> the strings in its header.
        chosen: tensor -> the format that it gets.
        transposed: those of the chosen that hold (..., in, out).
        parameters: chosen tensor -> its name in the model.
        left: tensor of two or more dimensions -> why it stays.
        layout: of the output.
        dtype: of tensors that stay; None: their own.
    """

    config: dict[str, Any]
    entries: dict[str, dict[str, Entry]]
    metadata: dict[str, dict[str, str]]
    layout: Layout
    dtype: torch.dtype | None = None
    chosen: dict[str, MXSpec] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    parameters: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def outputs(self, name: str, entry: Entry) -> dict[str, Entry]:
        """The tensors that are written for one that is read."""
        spec = self.chosen.get(name)
        if spec is None:
            return {name: Entry(self.dtype_of(entry.dtype), entry.shape)}
        *rows, columns = self.matrix(name, entry.shape)
        data, scale = self.layout.names(name, spec.element.name)
        stored = self.layout.check(name, spec.element.name)
        width = packed_length(columns, spec.element.bits)
        codes = (columns // BLOCK, width * BLOCK // columns) if stored.by_block else (width,)
        return {
            data: Entry(stored.dtype, (*rows, *codes)),
            scale: Entry(torch.uint8, (*rows, columns // BLOCK)),
        }

    def matrix(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a weight whose last dimension is the one that its product reduces."""
        return (*shape[:-2], shape[-1], shape[-2]) if name in self.transposed else shape

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """In which a tensor that stays is written."""
        return self.dtype if self.dtype is not None and dtype in HIGH_PRECISION else dtype

    def size(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(
            written.nbytes
            for entries in self.entries.values()
            for name, entry in entries.items()
            for written in self.outputs(name, entry).values()
        )


def plan_conversion(source: Path, quantizer: MXQuantizer, layout: Layout, dtype: torch.dtype | None) -> ConversionPlan:
    """Decide about every tensor of a checkpoint, and read no weight.

    Raises:
        MXError: for a folder that is no float checkpoint of transformers, and for what the layout cannot hold, by name.
    """
    config = read_json(source / CONFIG)
    if quantization := quantization_of(source):
        raise MXError(
            f"{str(source)!r} is quantized already (quant_method {quantization.get('quant_method')!r}): give the float "
            "checkpoint"
        )
    headers, model = headers_of(source), _on_meta(source, config)
    entries = {shard: header.entries for shard, header in headers.items()}
    _check_whole(source, model, entries)
    plan = ConversionPlan(config, entries, {shard: one.metadata for shard, one in headers.items()}, layout, dtype)
    modules = _choose(plan, model, select_weights(model, quantizer))
    _check_dtype(plan)
    check_readers(layout, modules, model)
    plan.config = {**config, "quantization_config": write_config(layout, modules)}
    if dtype is not None:
        plan.config["dtype"] = str(dtype).removeprefix("torch.")
        plan.config.pop("torch_dtype", None)
    return plan


def _check_whole(source: Path, model: PreTrainedModel, entries: dict[str, dict[str, Entry]]) -> None:
    """Raise an error where the files lack a tensor of the model: transformers would draw random values for it."""
    if missing := missing_tensors(model, [name for held in entries.values() for name in held]):
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise MXError(
            f"{str(source)!r} lacks {', '.join(missing[:_NAMED])}{more}, which the {type(model).__name__} of its "
            f"{CONFIG} has: fetch the checkpoint again, or name its own architecture in {CONFIG}"
        )


def _choose(plan: ConversionPlan, model: PreTrainedModel, selection: Selection) -> dict[str, Module]:
    """Give each tensor of the checkpoint a format, or the reason for which it stays.

    Returns:
        The modules that have weights, by their names in the model and by those in the checkpoint.

    Raises:
        MXError: where the layout does not have a format, or there is nothing to quantize.
    """
    rename, kinds = renames_of(model), weights_of(model)
    modules: dict[str, Module] = {}
    for entries in plan.entries.values():
        for name, entry in entries.items():
            parameter, merged = rename(name)
            specs, place = selection.chosen.get(parameter), parameter.rpartition(".")[0]
            scheme, reason = None, selection.left.get(parameter, "no linear layer holds it")
            if specs is not None:
                if not merged and entry.shape != tuple(model.get_parameter(parameter).shape):
                    raise MXError(
                        f"the checkpoint has {name} of shape {entry.shape}, its {CONFIG} of "
                        f"{tuple(model.get_parameter(parameter).shape)}: give files that belong together"
                    )
                reason = _unfit(plan, model.get_submodule(place), name, entry, merged, specs)
            if specs is not None and not reason:
                scheme = Scheme(specs.weight.element.name, specs.activation)
                plan.chosen[name], plan.parameters[name] = specs.weight, parameter
                if holds_columns(model.get_submodule(place)):
                    plan.transposed.add(name)
            elif len(entry.shape) > 1:
                plan.left[name] = reason
            if parameter in kinds:
                module = Module(kinds[parameter], scheme)
                if modules.setdefault(place, module) != module:
                    raise MXError(f"{plan.layout.name} has one format for each module, and {place} has several weights")
                modules[name.rpartition(".")[0]] = module
    if not plan.chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(plan.left.items())[:3])
        raise MXError(f"no tensor of the checkpoint would be quantized ({reasons}): give another recipe or layout")
    return {**modules, **{name.rpartition(".")[0]: Module(kind, None) for name, kind in kinds.items()}, **modules}


def _unfit(plan: ConversionPlan, layer: nn.Module, name: str, entry: Entry, merged: bool, specs: LayerSpecs) -> str:
    """The reason for which a tensor stays although its weight is selected; "" for none.

    Raises:
        MXError: where the layout does not have its formats.
    """
    layout = plan.layout
    columns = entry.shape[-2 if holds_columns(layer) else -1]
    if are_experts(layer):
        if merged == layout.only_experts:
            return f"{layout.name} has no place for " + ("experts apart" if merged else "experts in one tensor")
    elif merged:
        return "loading merges it with others"
    elif layout.only_experts:
        return f"{layout.name} has experts alone"
    elif type(layer) is not nn.Linear:
        return f"readers of {layout.name} keep layers of type {type(layer).__name__} in high precision"
    if columns % BLOCK:
        return f"its {columns} columns are no whole blocks of {BLOCK}"
    if entry.dtype not in HIGH_PRECISION:
        return f"it holds {entry.dtype}"
    layout.check(name, specs.weight.element.name)
    layout.check_inputs(name, specs.activation)
    if specs.weight.block_size != BLOCK:
        raise MXError(f"{layout.name} cannot hold {name} in {specs.weight}: its blocks have {BLOCK} values")
    return ""


def _check_dtype(plan: ConversionPlan) -> None:
    """Raise an error where the model would load in a dtype that readers of the layout do not compute in."""
    named = plan.config.get("dtype") or plan.config.get("torch_dtype")
    held = next(entries[name].dtype for entries in plan.entries.values() for name in entries if name in plan.chosen)
    dtype = plan.dtype or getattr(torch, str(named).removeprefix("torch."), held)
    if dtype not in plan.layout.dtypes:
        allowed = ", ".join(str(one).removeprefix("torch.") for one in plan.layout.dtypes)
        raise MXError(
            f"readers of {plan.layout.name} compute in {allowed}, and the checkpoint is in {dtype}: give the dtype "
            f"{allowed.partition(',')[0]!r} for the tensors that stay"
        )


def _on_meta(source: Path, config: dict[str, Any]) -> PreTrainedModel:
    """The model without its weights.

    Raises:
        MXError: where transformers does not have it.
    """
    transformers = import_extra("transformers", "hf")
    architecture = (config.get("architectures") or [None])[0]
    with user_errors(f"build the model of {str(source / CONFIG)!r}"), torch.device("meta"):
        kind = getattr(transformers, str(architecture), None)
        if kind is None:
            raise MXError(
                f"{str(source / CONFIG)!r} names the architecture {architecture!r}, which transformers has not"
            )
        return kind(transformers.AutoConfig.from_pretrained(source, trust_remote_code=False))
