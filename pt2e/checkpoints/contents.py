"""The contents of a checkpoint: the tensors and the configuration that a converted model becomes, all checked."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.node import Dequantize
from pt2mx.pt2e.checkpoints.checkpoint_names import parts_of
from pt2mx.pt2e.checkpoints.configs import write_config
from pt2mx.pt2e.checkpoints.layouts import BLOCK, Layout
from pt2mx.pt2e.checkpoints.model_modules import is_transposed, tied_names, weights_of
from pt2mx.pt2e.checkpoints.packed_uses import Use, float_tensors, uses_of
from pt2mx.pt2e.checkpoints.readers import check_readers
from pt2mx.pt2e.checkpoints.schemes import EMBEDDING, EXPERTS, LINEAR, Module, Scheme
from pt2mx.pt2e.checkpoints.unpack import take_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: what export calls tensors that are no attribute of the model
_LIFTED = ("lifted_tensor_", "_tensor_constant")
#: one of several experts, by its number
_EXPERT = re.compile(r"(\.experts)\.\d+\..*")


@dataclass(frozen=True)
class Contents:
    """The things that are written: tensors by their names in the checkpoint, and transformers' configuration."""

    tensors: dict[str, Tensor]
    config: Any


def contents_of(graph: GraphModule, model: PreTrainedModel, layout: Layout, unpack: Sequence[str] = ()) -> Contents:
    """Give the contents of a checkpoint.

    Args:
        graph: a converted model.
        model: the float model that it was made of.
        layout: of the checkpoint.
        unpack: regular expressions of modules whose weights are written as the values that their codes stand for.

    Returns:
        Its contents; tensors share the memory of the graph's.

    Raises:
        MXError: where the layout, or its readers, cannot hold what the graph computes, by name.
    """
    uses = uses_of(graph)
    prefix = _prefix(graph, uses, model)
    packed = _packed(uses, model, prefix)
    _check_dtypes(graph, layout)
    unpacked = take_values(packed, unpack, model, _dtype(graph))
    kinds = weights_of(model)
    for name, use in packed.items():
        _check(name, kinds[name], use, layout)
    tensors = {**_float_values(graph, model, prefix, {*packed, *unpacked}), **unpacked}
    modules = _modules(model, kinds, packed)
    check_readers(layout, modules, model)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(_dtype(graph)).removeprefix("torch.")
    config.quantization_config = write_config(layout, _named_both_ways(model, modules))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if any(set(names) & set(packed) for names in tied_names(model).values()):
        config.tie_word_embeddings, tied = False, {}  # readers tie no codes, and then no bias either
    return Contents({**_checkpoint_tensors(model, tensors, tied), **_packed_tensors(model, packed, layout)}, config)


def _prefix(graph: GraphModule, uses: list[Use], model: PreTrainedModel) -> str:
    """The words before the float model's names in the graph: a module around the model, or nothing."""
    if not uses:
        raise MXError("no weight of the converted model is packed: convert it with fold_quantize=True")
    known = dict(model.named_parameters(remove_duplicate=False))
    first = uses[0].weight
    for start in (0, *(i + 1 for i, letter in enumerate(first) if letter == ".")):
        if first[start:] in known:
            return first[:start]
    raise MXError(f"{type(model).__name__} has no parameter {first}: give the float model that was converted")


def _packed(uses: list[Use], model: PreTrainedModel, prefix: str) -> dict[str, Use]:
    """Parameter -> its packed form, under each name of a tied one whose module reads codes."""
    found: dict[str, Use] = {}
    known, tied = weights_of(model), tied_names(model)
    for use in uses:
        name = use.weight.removeprefix(prefix)
        path, _, attribute = name.rpartition(".")
        module = use.module.removeprefix(prefix)
        if module != path and f"{module}.{attribute}" in tied.get(name, ()):
            name = f"{module}.{attribute}"
        if name not in known:
            raise MXError(f"{type(model).__name__} has no weight {name}: give the float model that was converted")
        if name in found and found[name].inputs != use.inputs:
            raise MXError(f"inputs of {module} are quantized in some calls only: a checkpoint says it once a module")
        found[name] = use
    return found


def _check(name: str, kind: str, use: Use, layout: Layout) -> None:
    """Raise an error where the layout has no place for a weight."""
    if kind not in (LINEAR, EMBEDDING, EXPERTS):
        raise MXError(
            f"{name} is the weight of a {kind}: checkpoints hold those of linear layers, embeddings and experts; leave "
            "it in high precision (set_module_name_regex)"
        )
    if layout.only_experts and kind != EXPERTS:
        raise MXError(f"{layout.name} holds experts alone: leave {name} in high precision (set_module_name_regex)")
    if use.block_size != BLOCK:
        raise MXError(f"{name} has blocks of {use.block_size}: {layout.name} holds blocks of {BLOCK}")
    layout.check(name, use.element)
    if kind == LINEAR:
        layout.check_inputs(name.rpartition(".")[0], use.inputs)


def _dtype(graph: GraphModule) -> torch.dtype:
    """The dtype in which packed weights are multiplied."""
    return next(call.dtype for _, call in Dequantize.calls_in(graph.graph))


def _check_dtypes(graph: GraphModule, layout: Layout) -> None:
    for _, call in Dequantize.calls_in(graph.graph):
        if call.dtype not in layout.dtypes:
            dtype = str(layout.dtypes[0]).removeprefix("torch.")
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in layout.dtypes)
            raise MXError(
                f"the model computes in {call.dtype}, readers of {layout.name} in {names}: quantize it in "
                f"{dtype} (model.to(...) in Python, `pt2mx quantize --dtype {dtype}`)"
            )


def _float_values(graph: GraphModule, model: PreTrainedModel, prefix: str, others: set[str]) -> dict[str, Tensor]:
    """The tensors that are not among the `others`, by their names in the model: those of the graph, else the model's
    own."""
    held = {name.removeprefix(prefix): tensor for name, tensor in float_tensors(graph)}
    state, tied = model.state_dict(), tied_names(model)
    known = {*state, *(name for name, _ in model.named_buffers())}
    for name in held:
        if name not in known and not name.rpartition(".")[2].startswith(_LIFTED):
            raise MXError(
                f"the converted model computes with {name}, which {type(model).__name__} has not: a checkpoint has "
                "no place for it; quantize without smoothing and rotation"
            )
    found = {}
    for name, own in state.items():
        if name in others:
            continue
        values = next((held[same] for same in (name, *sorted(tied.get(name, ()))) if same in held), own)
        if values.is_meta:
            raise MXError(f"neither the converted nor the float model holds {name}: give the float model with weights")
        found[name] = values
    return found


def _modules(model: PreTrainedModel, kinds: dict[str, str], packed: dict[str, Use]) -> dict[str, Module]:
    """Each module that has a weight, with its scheme."""
    found: dict[str, Module] = {}
    for name, kind in kinds.items():
        path, use = name.rpartition(".")[0], packed.get(name)
        scheme = None if use is None else Scheme(use.element, use.inputs)
        if found.setdefault(path, Module(kind, scheme)).scheme != scheme:
            raise MXError(f"the weights of {path} are quantized in different ways: a checkpoint says it once a module")
    return found


def _named_both_ways(model: PreTrainedModel, modules: dict[str, Module]) -> dict[str, Module]:
    """The modules by their names in the model, and by those in the checkpoint: some readers look for these."""
    found = dict(modules)
    for path, module in modules.items():
        weights = [f"{path}.{name}" for name in weights_of(model.get_submodule(path)) if "." not in name]
        if is_transposed(model, weights[0]):
            continue
        for parts in parts_of(model, weights).values():
            names = (part.rpartition(".")[0] for part in parts)
            found |= {_EXPERT.sub(r"\1.*", name) if module.kind == EXPERTS else name: module for name in names}
    return found


def _checkpoint_tensors(model: PreTrainedModel, tensors: dict[str, Tensor], tied: dict[str, str]) -> dict[str, Tensor]:
    """Float tensors by the names of the checkpoint, those once that readers tie: name -> the name that is written."""
    from transformers.core_model_loading import revert_weight_conversion

    kept = {name: tensor for name, tensor in tensors.items() if tied.get(name) not in tensors}
    owners = {tensor.data_ptr(): name for name, tensor in kept.items()}
    # files of safetensors hold no memory twice
    kept = {name: tensor if owners[tensor.data_ptr()] == name else tensor.clone() for name, tensor in kept.items()}
    return revert_weight_conversion(model, kept)


def _packed_tensors(model: PreTrainedModel, packed: dict[str, Use], layout: Layout) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, use in packed.items():
        if is_transposed(model, name):
            found |= layout.to_tensors(name, use.element, use.data, use.scale)
            continue
        data, scale = use.data.flatten(0, -2), use.scale.flatten(0, -2)
        for part, rows in parts_of(model, [name])[name].items():
            found |= layout.to_tensors(part, use.element, data[rows], scale[rows])
    return found
