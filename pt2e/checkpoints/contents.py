"""Build the tensors and the configuration of a checkpoint from a converted model, and check them."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.node import Dequantize
from pt2mx.kernels.float_scales import has_each
from pt2mx.pt2e.checkpoints.checkpoint_names import check_compatibility, fused_with, stored_parts
from pt2mx.pt2e.checkpoints.configs import write_config
from pt2mx.pt2e.checkpoints.layouts import LAYOUTS, Layout
from pt2mx.pt2e.checkpoints.merge_parts import rows_of_scales
from pt2mx.pt2e.checkpoints.module_schemes import (
    EMBEDDING,
    EXPERTS,
    LINEAR,
    Module,
    Scheme,
    is_transposed,
    tied_names,
    weights_of,
)
from pt2mx.pt2e.checkpoints.recode import alike_form, recode, shared_factor
from pt2mx.pt2e.checkpoints.regroup import divide
from pt2mx.pt2e.checkpoints.weight_formats import spec_of
from pt2mx.pt2e.checkpoints.weight_users import WeightUser, float_tensors, take_values, weight_users

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: prefixes that export gives to tensors that are no attribute of the model
_LIFTED = ("lifted_tensor_", "_tensor_constant")
#: one of several experts, with its number
_EXPERT = re.compile(r"(\.experts)\.\d+\..*")


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint: tensors by their names in it, and transformers' configuration."""

    tensors: dict[str, Tensor]
    config: Any


def build_contents(graph: GraphModule, model: PreTrainedModel, layout: Layout, unpack: Sequence[str] = ()) -> Contents:
    """Return the contents of a checkpoint.

    Args:
        graph: a converted model.
        model: the float model that was converted.
        layout: the layout of the checkpoint.
        unpack: regular expressions of modules whose weights are written as dequantized values.

    Returns:
        The contents; their tensors share memory with the graph.

    Raises:
        MXError: where the layout, or a library that loads it, cannot represent what the graph computes.
    """
    tensors, modules, unties = build_tensors(graph, model, layout, unpack)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(_dtype(graph)).removeprefix("torch.")
    config.quantization_config = write_config(layout, _named_both_ways(model, modules, layout))
    if unties:
        config.tie_word_embeddings = False
    return Contents(tensors, config)


def build_tensors(
    graph: GraphModule, model: PreTrainedModel, layout: Layout, unpack: Sequence[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Module], bool]:
    """Return the tensors of `build_contents`, the modules with weights, and True where a tied weight is there twice."""
    users = weight_users(graph)
    prefix = _prefix(graph, users, model)
    packed = _packed(users, model, prefix)
    _check_dtypes(graph, layout)
    unpacked = take_values(packed, unpack, model, _dtype(graph))
    kinds = weights_of(model)
    packed = {name: _in_layout(name, packed, layout, _dtype(graph)) for name in packed}
    _check_factors(packed, layout)
    for name, user in packed.items():
        _check(name, kinds[name], user, layout)
    tensors = {**_float_values(graph, users, model, prefix, {*packed, *unpacked}), **unpacked}
    modules = _modules(model, kinds, packed)
    check_compatibility(layout, modules, model)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    # transformers ties no codes, and then no bias either
    unties = any(set(names) & set(packed) for names in tied_names(model).values())
    floats = _checkpoint_tensors(model, tensors, {} if unties else tied)
    for name in packed:
        if is_transposed(model, name) and not layout.only_experts:
            bias = divide(model, f"{name}_bias", into_one=False)
            floats |= bias.bias(floats)
            del floats[bias.name]
    return {**floats, **_packed_tensors(model, packed, layout)}, modules, unties


def _prefix(graph: GraphModule, users: list[WeightUser], model: PreTrainedModel) -> str:
    """Return the prefix of the float model's names in the graph, from a module around the model; "" without one."""
    if not users:
        raise MXError("no weight of the converted model is packed: convert it with fold_quantize=True")
    known = dict(model.named_parameters(remove_duplicate=False))
    first = users[0].weight
    for start in (0, *(i + 1 for i, letter in enumerate(first) if letter == ".")):
        if first[start:] in known:
            return first[:start]
    raise MXError(f"{type(model).__name__} has no parameter {first}: give the float model that was converted")


def _packed(users: list[WeightUser], model: PreTrainedModel, prefix: str) -> dict[str, WeightUser]:
    """Return parameter -> its packed form; a tied parameter has one under the name of each module that uses codes."""
    packed: dict[str, WeightUser] = {}
    known, tied = weights_of(model), tied_names(model)
    for user in users:
        name = user.weight.removeprefix(prefix)
        path, _, attribute = name.rpartition(".")
        module = user.module.removeprefix(prefix)
        if module != path and f"{module}.{attribute}" in tied.get(name, ()):
            name = f"{module}.{attribute}"
        if name not in known:
            raise MXError(f"{type(model).__name__} has no weight {name}: give the float model that was converted")
        if name in packed and packed[name].inputs != user.inputs:
            raise MXError(f"inputs of {module} are quantized in some calls only: a checkpoint says it once a module")
        packed[name] = user
    return packed


def _in_layout(name: str, packed: dict[str, WeightUser], layout: Layout, dtype: torch.dtype) -> WeightUser:
    """Return a weight in the format of the layout that holds the same values, where that is another one."""
    user = packed[name]
    form = alike_form(user.form, layout.stored)
    if form in (None, user.form):
        return user
    factor = shared_factor({one: packed[one].packed for one in fused_with(name, packed)}, form)
    recoded = recode(name, user.packed, form, dtype, factor)
    return dataclasses.replace(user, spec=recoded.spec, scale=recoded.scale, tensor_scale=recoded.tensor_scale)


def _check_factors(packed: dict[str, WeightUser], layout: Layout) -> None:
    """Raise an `MXError` where inputs are multiplied by factors that the layout has no place for."""
    factors = [name for name, user in packed.items() if user.pre_scale is not None]
    if factors and not layout.pre_scale:
        able = ", ".join(other.name for other in LAYOUTS.values() if other.pre_scale)
        raise MXError(
            f"{factors[0].rpartition('.')[0]} multiplies its inputs by factors (pre_quant_scale), which {layout.name} "
            f"has no place for: give the layout {able}"
        )


def _check(name: str, kind: str, user: WeightUser, layout: Layout) -> None:
    """Raise an `MXError` where the layout cannot hold a weight."""
    if kind not in (LINEAR, EMBEDDING, EXPERTS):
        raise MXError(
            f"{name} is the weight of a {kind}: checkpoints hold weights of linear layers, embeddings and experts; "
            "leave it in high precision (set_module_name_regex)"
        )
    if layout.only_experts and kind != EXPERTS:
        raise MXError(f"{layout.name} holds experts alone: leave {name} in high precision (set_module_name_regex)")
    layout.check(name, user.form)
    block_size = spec_of(user.form).block_size
    if user.spec.block_size != block_size:
        raise MXError(f"{name} has blocks of {user.spec.block_size}: {layout.name} holds blocks of {block_size}")
    if kind == LINEAR:
        layout.check_inputs(name.rpartition(".")[0], user.form, user.inputs)


def _dtype(graph: GraphModule) -> torch.dtype:
    """Return the dtype in which packed weights are multiplied."""
    return next(call.dtype for _, call in Dequantize.calls_in(graph.graph))


def _check_dtypes(graph: GraphModule, layout: Layout) -> None:
    for _, call in Dequantize.calls_in(graph.graph):
        if call.dtype not in layout.dtypes:
            dtype = str(layout.dtypes[0]).removeprefix("torch.")
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in layout.dtypes)
            raise MXError(
                f"the model computes in {call.dtype}, loaders of {layout.name} in {names}: quantize it in "
                f"{dtype} (model.to(...) in Python, `pt2mx quantize --dtype {dtype}`)"
            )


def _float_values(
    graph: GraphModule, users: list[WeightUser], model: PreTrainedModel, prefix: str, others: set[str]
) -> dict[str, Tensor]:
    """Return the tensors of the graph, or else of the model, by their names in the model, except `others`."""
    values = {name.removeprefix(prefix): tensor for name, tensor in float_tensors(graph, users)}
    state, tied = model.state_dict(), tied_names(model)
    known = {*state, *(name for name, _ in model.named_buffers())}
    for name in values:
        if name not in known and not name.rpartition(".")[2].startswith(_LIFTED):
            raise MXError(
                f"the converted model computes with {name}, which {type(model).__name__} has not: a checkpoint has "
                "no place for it; quantize without smoothing and rotation"
            )
    tensors = {}
    for name, tensor in state.items():
        if name in others:
            continue
        tensor = next((values[alias] for alias in (name, *sorted(tied.get(name, ()))) if alias in values), tensor)
        if tensor.is_meta:
            raise MXError(f"neither the converted nor the float model holds {name}: give the float model with weights")
        tensors[name] = tensor
    return tensors


def _modules(model: PreTrainedModel, kinds: dict[str, str], packed: dict[str, WeightUser]) -> dict[str, Module]:
    """Return each module that has a weight, with its scheme."""
    modules: dict[str, Module] = {}
    for name, kind in kinds.items():
        path, user = name.rpartition(".")[0], packed.get(name)
        scheme = None if user is None else Scheme(user.form, user.inputs)
        module = Module(kind, scheme, pre_scaled=user is not None and user.pre_scale is not None)
        if modules.setdefault(path, module).scheme != scheme:
            raise MXError(f"the weights of {path} are quantized in different ways: a checkpoint says it once a module")
    return modules


def _named_both_ways(model: PreTrainedModel, modules: dict[str, Module], layout: Layout) -> dict[str, Module]:
    """Return the modules by their names in the model and in the checkpoint: libraries look for either."""
    named = dict(modules)
    for path, module in modules.items():
        weights = [f"{path}.{name}" for name in weights_of(model.get_submodule(path)) if "." not in name]
        if is_transposed(model, weights[0]) and module.scheme is None:
            continue
        for weight in weights:
            names = (part.rpartition(".")[0] for part in stored_parts(model, weight, layout) or ())
            named |= {_EXPERT.sub(r"\1.*", name) if module.kind == EXPERTS else name: module for name in names}
    return named


def _checkpoint_tensors(model: PreTrainedModel, tensors: dict[str, Tensor], tied: dict[str, str]) -> dict[str, Tensor]:
    """Return float tensors by their names in the checkpoint; tied ones, name -> the name to write, only once."""
    from transformers.core_model_loading import revert_weight_conversion

    kept = {name: tensor for name, tensor in tensors.items() if tied.get(name) not in tensors}
    owners = {tensor.data_ptr(): name for name, tensor in kept.items()}
    # a safetensors file cannot hold the same memory twice
    kept = {name: tensor if owners[tensor.data_ptr()] == name else tensor.clone() for name, tensor in kept.items()}
    return revert_weight_conversion(model, kept)


def _packed_tensors(model: PreTrainedModel, packed: dict[str, WeightUser], layout: Layout) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, user in packed.items():
        parts = stored_parts(model, name, layout)
        if parts is None:
            tensors |= layout.to_tensors(name, user.form, user.data, user.scale, user.tensor_scale)
            continue
        data, scale = user.data.flatten(0, -2), user.scale.flatten(0, -2)
        for part, rows in parts.items():
            # a file cannot hold the same memory twice
            tensor_scale, input_scale = (
                None if one is None else one.clone() for one in (user.tensor_scale, user.input_scale)
            )
            if tensor_scale is not None and has_each(tensor_scale):
                tensor_scale = tensor_scale[rows[0] // user.data.shape[-2]].clone()
            scales = scale[rows_of_scales(part, user.spec, rows)]
            tensors |= layout.to_tensors(part, user.form, data[rows], scales, tensor_scale)
            module = part.rpartition(".")[0]
            if input_scale is not None:
                shape = layout.stored[user.form].tensor_scale_shape
                tensors[f"{module}.{layout.input_scale}"] = input_scale.reshape(shape)
            if user.pre_scale is not None:
                tensors[f"{module}.{layout.pre_scale}"] = user.pre_scale.detach().clone()
    return tensors
