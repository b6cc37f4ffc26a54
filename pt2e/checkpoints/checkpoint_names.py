"""The names of a model's tensors in its checkpoint: transformers renames some, and merges experts, when it loads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.layouts import Layout
from pt2mx.pt2e.checkpoints.module_schemes import (
    EXPERTS,
    LINEAR,
    Module,
    is_transposed,
    most_common,
    tied_names,
    weights_of,
)
from pt2mx.pt2e.checkpoints.weight_formats import NVFP4_DIVISOR

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: experts that transformers (5.17) turns into linear layers before it loads weights of compressed-tensors
_SPLIT = "Llama4TextExperts"


def parts_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the checkpoint that make up parameters.

    Args:
        model: the model, on any device, also meta.
        names: names of parameters (..., N, K).

    Returns:
        name -> {name in the checkpoint: the rows of the parameter that it holds}; a parameter counts as rows of K.

    Raises:
        MXError: where the checkpoint does not hold whole rows.
    """
    from transformers.core_model_loading import revert_weight_conversion

    rows_of = {}
    for name in names:
        shape = model.get_parameter(name).shape[:-1]
        # transformers converts the row numbers as it would the rows; two columns, because it squeezes a single one
        rows = torch.arange(shape.numel()).view(*shape, 1).expand(*shape, 2)
        parts = revert_weight_conversion(model, {name: rows})
        if any(part.shape[-1] != 2 or not part[..., 0].equal(part[..., 1]) for part in parts.values()):
            raise MXError(f"the checkpoint has {name} in another order than rows: it cannot be quantized there")
        rows_of[name] = {part_name: part[..., 0].flatten() for part_name, part in parts.items()}
    return rows_of


def experts_in_one_tensor(model: PreTrainedModel) -> set[str]:
    """Return the modules of experts that have one tensor per weight in the checkpoint, as in the model.

    Args:
        model: the model, on any device, also meta.
    """
    experts = [name for name, kind in weights_of(model).items() if kind == EXPERTS]
    whole = (name for name in experts if is_transposed(model, name) or len(parts_of(model, [name])[name]) == 1)
    return {name.rpartition(".")[0] for name in whole}


def renames_of(model: PreTrainedModel) -> Callable[[str], tuple[str, bool]]:
    """Return the function that maps a tensor of the checkpoint to its name in the model, as transformers renames it.

    The function also returns True where transformers merges the tensor with others.

    Args:
        model: the model, on any device, also meta.
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
    """Return the tensors that the parameters of a model need and a checkpoint lacks.

    One name of a tied parameter is enough. Tensors that transformers computes itself are not missing.

    Args:
        model: the model, on any device, also meta.
        names: the tensors of the checkpoint.

    Returns:
        The names under which transformers writes the missing tensors into a checkpoint.
    """
    from transformers.core_model_loading import revert_weight_conversion

    rename, tied = renames_of(model), tied_names(model)
    sources: dict[str, set[str]] = defaultdict(set)
    merged = set()
    for name in names:
        parameter, is_merged = rename(name)
        sources[parameter].add(name)
        merged |= {parameter} if is_merged else set()
    computed = model._keys_to_ignore_on_load_missing or ()
    missing: list[str] = []
    for name, parameter in model.named_parameters():
        present = sources.keys() & {name, *tied.get(name, ())}
        if name not in merged if present else any(re.search(pattern, name) for pattern in computed):
            continue
        parts, available = set(revert_weight_conversion(model, {name: parameter})), sources.get(name, set())
        if not present or parts & available:  # a checkpoint of an older version has the parts under other names
            missing += sorted(parts - available)
    return missing


def check_compatibility(layout: Layout, modules: Mapping[str, Module], model: PreTrainedModel) -> None:
    """Raise an `MXError` for experts that the libraries of a layout would not find or would compute differently.

    Args:
        layout: the layout of the checkpoint.
        modules: modules by their names in the model; other names are ignored.
        model: the model, on any device, also meta.

    Raises:
        MXError: naming a module.
    """
    layers = dict(model.named_modules())
    experts = {name: module for name, module in modules.items() if module.kind == EXPERTS and name in layers}
    whole = experts_in_one_tensor(model)
    for name, module in experts.items():
        if module.scheme is None:
            continue
        if module.scheme.inputs is not None:
            raise MXError(
                f"loaders of checkpoints quantize no inputs of experts: leave the inputs of {name} in high precision"
            )
        if layout.only_experts and not layers[name].is_transposed:
            raise MXError(f"{layout.name} is read for experts as gpt-oss has them alone: {name} are others")
        if name in whole and not layout.only_experts:
            raise MXError(f"{layout.name} has no place for {name}, experts in one tensor: leave them in high precision")
    if layout.name == "compressed-tensors":
        for name, module in modules.items():
            if module.kind == _SPLIT:
                raise MXError(f"transformers would not find the weights of {name}, a {_SPLIT}: give another layout")
        _check_merged({name: module for name, module in experts.items() if name not in whole}, modules)


def _check_merged(experts: Mapping[str, Module], modules: Mapping[str, Module]) -> None:
    """Check experts that transformers (5.17) merges into one parameter, with one scheme for all, when it loads them."""
    if not experts:
        return
    (name, first), *_ = experts.items()
    if any(module.scheme != first.scheme for module in experts.values()):
        raise MXError(f"transformers reads all experts in one format: {name} and others differ")
    linear = most_common(module for module in modules.values() if module.kind == LINEAR)
    if first.scheme is None and linear and linear[0].form != "fp8_e4m3":
        raise MXError(f"transformers takes {name} to be packed as linear layers are: quantize experts too")
    if first.scheme is not None and first.scheme.form == "fp8_e4m3":
        raise MXError(f"transformers reads experts in FP8 with one scale a row: give {name} another format")
    if first.scheme is not None and first.scheme.form == NVFP4_DIVISOR:
        raise MXError(f"transformers leaves out the tensor scales of experts: give {name} MXFP4, or another layout")
