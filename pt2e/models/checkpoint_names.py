"""The names of a model's tensors in its checkpoint: transformers renames some, and merges experts, when it loads.

Models may be on any device, also meta.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.module_schemes import (
    EXPERTS,
    LINEAR,
    Module,
    is_transposed,
    most_common,
    tied_names,
    weights_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: dtypes whose numbers are values; those of others need a scale
_VALUES = (*HIGH_PRECISION, torch.float64)
#: tensor of a checkpoint -> the rows of a parameter that it holds
Parts = Mapping[str, Tensor]
#: experts that transformers (5.17) turns into linear layers before it loads weights of compressed-tensors
_SPLIT = "Llama4TextExperts"


def parts_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the checkpoint that make up parameters (..., N, K), which count as rows of K: name ->
    {name in the checkpoint: the rows of the parameter that it holds}."""
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


#: weight of experts in one tensor -> the projections that it holds
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


def linear_parts(model: PreTrainedModel, name: str) -> dict[str, Tensor]:
    """Return the linear layers that hold a weight (experts, K, N), or its bias (experts, N), of gpt-oss's experts in
    other checkpoints: name in the checkpoint -> the rows that it holds, of experts * N.

    Example:
        >>> import torch, transformers
        >>> from pt2mx.pt2e.models.checkpoint_names import linear_parts
        >>> sizes = dict(hidden_size=32, intermediate_size=2, num_hidden_layers=1, num_local_experts=2, vocab_size=8)
        >>> with torch.device("meta"):
        ...     model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, pad_token_id=None))
        >>> parts = linear_parts(model, "model.layers.0.mlp.experts.gate_up_proj")
        >>> parts["model.layers.0.mlp.experts.1.up_proj.weight"]
        tensor([5, 7])
    """
    path, _, attribute = name.rpartition(".")
    module, projections = model.get_submodule(path), _PROJECTIONS[attribute.removesuffix("_bias")]
    experts, *_, rows = module.get_parameter(attribute).shape
    of_experts = torch.arange(experts * rows)
    if module.is_concatenated:
        of_experts = of_experts.view(experts, len(projections), -1)
    else:
        of_experts = of_experts.view(experts, -1, len(projections)).mT
    suffix = "bias" if attribute.endswith("_bias") else "weight"
    parts = {}
    for expert in range(experts):
        for projection, part in zip(projections, of_experts[expert], strict=True):
            parts[f"{path}.{expert}.{projection}.{suffix}"] = part.clone()
    return parts


def stored_parts(model: PreTrainedModel, name: str, layout: Layout) -> dict[str, Tensor] | None:
    """Return the tensors of a layout that make up a weight, as `parts_of`; None where one tensor has its name."""
    if not is_transposed(model, name):
        return parts_of(model, [name])[name]
    return None if layout.only_experts else linear_parts(model, name)


def experts_in_one_tensor(model: PreTrainedModel) -> set[str]:
    """Return the modules of experts that have one tensor per weight in the checkpoint, as in the model."""
    whole = set()
    for name, kind in weights_of(model).items():
        if kind == EXPERTS and (is_transposed(model, name) or len(parts_of(model, [name])[name]) == 1):
            whole.add(name.rpartition(".")[0])
    return whole


def renames_of(model: PreTrainedModel) -> Callable[[str], tuple[str, bool]]:
    """Return the function that maps a tensor of the checkpoint to its name in the model, as transformers renames it.

    The function also returns True where transformers merges the tensor with others.
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


def no_values(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return the tensors of a checkpoint that a model takes for float values, although their dtype is that of codes or
    of integers."""
    rename, state = renames_of(model), model.state_dict()
    taken = []
    for name, dtype in dtypes.items():
        if dtype not in _VALUES:
            target = state.get(rename(name)[0])
            if target is not None and target.dtype in _VALUES:
                taken.append(name)
    return taken


def missing_tensors(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the tensors that the parameters of a model need and a checkpoint with tensors of these names lacks, under
    the names with which transformers writes them.

    One name of a tied parameter is enough. Tensors that transformers computes itself are not missing.
    """
    from transformers.core_model_loading import revert_weight_conversion

    rename, tied = renames_of(model), tied_names(model)
    sources: dict[str, set[str]] = defaultdict(set)
    merged = set()
    for name in names:
        parameter, is_merged = rename(name)
        sources[parameter].add(name)
        if is_merged:
            merged.add(parameter)
    computed = model._keys_to_ignore_on_load_missing or ()
    missing: list[str] = []
    for name, parameter in model.named_parameters():
        present = sources.keys() & {name, *tied.get(name, ())}
        if present and name not in merged:
            continue
        if not present and any(re.search(pattern, name) for pattern in computed):
            continue
        parts, available = set(revert_weight_conversion(model, {name: parameter})), sources.get(name, set())
        if not present or parts & available:  # a checkpoint of an older version has the parts under other names
            missing += sorted(parts - available)
    return missing


#: layers of one module that engines, such as vLLM, multiply at once, and so with one tensor scale
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def fused_with(name: str, weights: Collection[str]) -> set[str]:
    """Return the weights that libraries fuse with a weight, itself included.

    Example:
        >>> from pt2mx.pt2e.models.checkpoint_names import fused_with
        >>> sorted(fused_with("mlp.up_proj.weight", ["mlp.up_proj.weight", "mlp.gate_proj.weight"]))
        ['mlp.gate_proj.weight', 'mlp.up_proj.weight']
    """
    module, _, attribute = name.rpartition(".")
    parent, _, layer = module.rpartition(".")
    fused = {name}
    for layers in _FUSED:
        for other in layers if layer in layers else ():
            weight = f"{parent}.{other}.{attribute}".removeprefix(".")
            if weight in weights:
                fused.add(weight)
    return fused


def check_compatibility(layout: Layout, modules: Mapping[str, Module], model: PreTrainedModel) -> None:
    """Raise an `MXError` for experts that no library of a layout would find or compute as the model does.

    Modules have their names in the model; other names are ignored. What one library loads and another does not is in
    `engines`.
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
        if name in whole and not (layout.only_experts or (layout.linear_experts and layers[name].is_transposed)):
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
