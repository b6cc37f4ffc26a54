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
from pt2mx.pt2e.checkpoints import transform_config
from pt2mx.pt2e.checkpoints.configs import write_config
from pt2mx.pt2e.checkpoints.engines import HEAD, engines_that_load, is_refused
from pt2mx.pt2e.checkpoints.merge_parts import rows_of_scales
from pt2mx.pt2e.checkpoints.recode import alike_form, recode, shared_factor, tensor_scaled_inputs
from pt2mx.pt2e.checkpoints.regroup import divide
from pt2mx.pt2e.checkpoints.weight_users import WeightUser, dequantized_values, float_tensors, weight_users
from pt2mx.pt2e.models.checkpoint_names import check_compatibility, fused_with, stored_parts
from pt2mx.pt2e.models.layouts import LAYOUTS, Layout, inputs_text
from pt2mx.pt2e.models.module_schemes import (
    EMBEDDING,
    EXPERTS,
    LINEAR,
    Module,
    Scheme,
    head_of,
    is_transposed,
    tied_names,
    weights_of,
    with_head,
)
from pt2mx.pt2e.models.weight_formats import spec_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: prefixes that export gives to tensors that are no attribute of the model
_LIFTED = ("lifted_tensor_", "_tensor_constant")
#: one of several experts, with its number
_EXPERT = re.compile(r"(\.experts)\.\d+\..*")


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Args:
        tensors: its tensors by their names in it.
        config: transformers' configuration.
        engines: what each engine is known to do with it, as `engines_that_load` returns it.
        changes: what it states otherwise than the graph, a line each.
    """

    tensors: dict[str, Tensor]
    config: Any
    engines: dict[str, str]
    changes: list[str]


@dataclass(frozen=True)
class Parts:
    """The tensors of a checkpoint, the modules with weights, and what it states otherwise than the graph.

    Args:
        tensors: its tensors by their names in it.
        modules: the modules with weights by their names in the model.
        unties: True where a tied weight is there twice.
        changes: what it states otherwise than the graph, a line each.
    """

    tensors: dict[str, Tensor]
    modules: dict[str, Module]
    unties: bool
    changes: list[str]


def build_contents(
    graph: GraphModule,
    model: PreTrainedModel,
    layout: Layout,
    unpack: Sequence[str] = (),
    quantized_head: bool = False,
) -> Contents:
    """Return the contents of a checkpoint.

    Args:
        graph: a converted model.
        model: the float model that was converted.
        layout: the layout of the checkpoint.
        unpack: regular expressions of modules whose weights are written as dequantized values.
        quantized_head: True: write the codes of the head where no engine is known to load them, too.

    Returns:
        The contents; their tensors share memory with the graph.

    Raises:
        MXError: where the layout, or a library that loads it, cannot represent what the graph computes.
    """
    parts = build_tensors(graph, model, layout, unpack, quantized_head)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(_dtype(graph)).removeprefix("torch.")
    config.quantization_config = write_config(layout, _named_both_ways(model, parts.modules, layout))
    if parts.unties:
        config.tie_word_embeddings = False
    return Contents(parts.tensors, config, engines_that_load(layout, parts.modules, model), parts.changes)


def build_tensors(
    graph: GraphModule,
    model: PreTrainedModel,
    layout: Layout,
    unpack: Sequence[str] = (),
    quantized_head: bool = False,
) -> Parts:
    """Return the tensors of `build_contents`, and the modules with weights."""
    users = weight_users(graph)
    prefix = _prefix(users, model)
    packed = _packed(users, model, prefix)
    _check_dtypes(graph, layout)
    dtype, changes = _dtype(graph), []
    values = dequantized_values(packed, unpack, model, dtype)
    head = None if quantized_head else _refused_head(packed, model, layout)
    if head is not None and f"{head}.weight" not in values:
        values |= dequantized_values(packed, [re.escape(head)], model, dtype)
        changes.append(f"{head} is written as values: no engine is known to load its codes in {layout.name}")
    kept = {name: user for name, user in packed.items() if name not in values}
    stored = {name: _in_layout(name, kept, layout, dtype) for name in kept}
    changes += _changed_inputs(kept, stored, layout)
    _check_factors(stored, layout)
    kinds = weights_of(model)
    for name, user in stored.items():
        _check(name, kinds[name], user, layout)
        if user.rotated:
            _check_rotation(name, kinds[name], layout)
    tensors = {**_float_values(graph, users, model, prefix, set(packed)), **values}
    modules = with_head(_modules(kinds, stored), model)
    check_compatibility(layout, modules, model)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    # transformers ties no codes, and then no bias either
    unties = any(set(names) & set(stored) or not _are_equal(names, tensors) for names in tied_names(model).values())
    floats = _checkpoint_tensors(model, tensors, {} if unties else tied)
    for name in stored:
        if is_transposed(model, name) and not layout.only_experts:
            bias = divide(model, f"{name}_bias", into_one=False)
            floats |= bias.bias(floats)
            del floats[bias.name]
    return Parts({**floats, **_packed_tensors(model, stored, layout)}, modules, unties, changes)


def _prefix(users: list[WeightUser], model: PreTrainedModel) -> str:
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


def _refused_head(packed: dict[str, WeightUser], model: PreTrainedModel, layout: Layout) -> str | None:
    """Return the head if no engine is known to load its codes, and values can replace them: its inputs are floats."""
    head = head_of(model)
    user = packed.get(f"{head}.weight")
    if user is None or user.inputs is not None or user.rotated or not is_refused(layout.name, HEAD, user.form):
        return None
    return head


def _changed_inputs(own: dict[str, WeightUser], packed: dict[str, WeightUser], layout: Layout) -> list[str]:
    """Return a line for each format of inputs that the layout states otherwise."""
    specs = dict.fromkeys((own[name].inputs, user.inputs) for name, user in packed.items())
    return [inputs_text(layout, old, new) for old, new in specs if old is not None and new is not None and old != new]


def _in_layout(name: str, packed: dict[str, WeightUser], layout: Layout, dtype: torch.dtype) -> WeightUser:
    """Return a weight in the format of the layout that holds the same values, where that is another one."""
    user = _inputs_in_layout(packed[name], layout)
    form = alike_form(user.form, layout.stored)
    if form in (None, user.form):
        return user
    factor = shared_factor({one: packed[one].packed for one in fused_with(name, packed)}, form)
    recoded = recode(name, user.packed, form, dtype, factor)
    return dataclasses.replace(user, spec=recoded.spec, scale=recoded.scale, tensor_scale=recoded.tensor_scale)


def _inputs_in_layout(user: WeightUser, layout: Layout) -> WeightUser:
    """Return a user whose inputs have a tensor scale as the layout has it: a factor or a divisor.

    Libraries of both kinds choose scales by their own mode, so other modes stay, and are refused."""
    if user.inputs is None or user.input_scale is None:
        return user
    inputs = tensor_scaled_inputs(user.inputs, layout)
    stated = any(other.takes_inputs(user.inputs) for other in LAYOUTS.values())
    if inputs is None or not stated or inputs.divides_by_tensor_scale == user.inputs.divides_by_tensor_scale:
        return user
    return dataclasses.replace(user, inputs=inputs, input_scale=user.input_scale.reciprocal())


def _check_factors(packed: dict[str, WeightUser], layout: Layout) -> None:
    """Raise an `MXError` where inputs are multiplied by factors that the layout has no place for."""
    factors = [name for name, user in packed.items() if user.pre_scale is not None]
    if factors and not layout.pre_scale:
        able = ", ".join(other.name for other in LAYOUTS.values() if other.pre_scale)
        raise MXError(
            f"{factors[0].rpartition('.')[0]} multiplies its inputs by factors (pre_quant_scale), which {layout.name} "
            f"has no place for: give the layout {able}"
        )


def _check_rotation(name: str, kind: str, layout: Layout) -> None:
    """Raise an `MXError` where the layout has no place for a rotation of the inputs of a weight."""
    if layout.transforms and kind == LINEAR:
        return
    able = ", ".join(other.name for other in LAYOUTS.values() if other.transforms)
    raise MXError(
        f"{name.rpartition('.')[0]} rotates its inputs, for which only linear layers of {able} have a place: "
        + "give this layout, or " * (kind == LINEAR)
        + "optimize without Rotation, as preset='fast' does, or with Rotation(online=False)"
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
                "no place for it; quantize without smoothing, and without a rotation at run time"
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


def _are_equal(names: set[str], tensors: dict[str, Tensor]) -> bool:
    """Return whether the tensors of these names have the same values."""
    values = [tensors[name] for name in names if name in tensors]
    return all(torch.equal(value, values[0]) for value in values[1:])


def _modules(kinds: dict[str, str], packed: dict[str, WeightUser]) -> dict[str, Module]:
    """Return each module that has a weight, with its scheme."""
    modules: dict[str, Module] = {}
    for name, kind in kinds.items():
        path, user = name.rpartition(".")[0], packed.get(name)
        scheme = None if user is None else Scheme(user.form, user.inputs)
        module = Module(kind, scheme)
        if user is not None:
            module = Module(kind, scheme, pre_scaled=user.pre_scale is not None, rotated=user.rotated)
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
            tensor_scale = user.tensor_scale
            if tensor_scale is not None and has_each(tensor_scale):
                tensor_scale = tensor_scale[rows[0] // user.data.shape[-2]]
            scales = scale[rows_of_scales(part, user.spec, rows)]
            tensors |= layout.to_tensors(part, user.form, data[rows], scales, tensor_scale)
            module = part.rpartition(".")[0]
            if user.input_scale is not None:
                shape = layout.stored[user.form].tensor_scale_shape
                tensors[f"{module}.{layout.input_scale}"] = user.input_scale.reshape(shape)
            if user.pre_scale is not None:
                tensors[f"{module}.{layout.pre_scale}"] = user.pre_scale
            if user.rotated:
                tensors |= transform_config.tensors(module, user.rotated)
    return tensors
