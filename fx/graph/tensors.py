"""Copies of the tensors of a graph module. Tensors that share memory which the graph writes go on to share it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2mx.fx.graph.aliasing import storage_of, written_storages


def copy_sharing_tensors(model: GraphModule) -> GraphModule:
    """A deep copy of graph, submodules and meta whose parameters and buffers are those of `model`.

    What a pass does to the copy's graph or to the attributes of its modules leaves `model` as it was. Memory that the
    graph writes (a counter, a cache) is copied, without the gradient that a run may have left in it: running the copy
    must not change `model` either.
    """
    written = written_storages(model)
    held = _tensors_of(model)
    memo = {id(tensor): tensor for tensor in held if storage_of(tensor) not in written}
    memo |= replaced([tensor for tensor in held if storage_of(tensor) in written], written, Tensor.clone)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        return copy.deepcopy(model, memo)


def map_tensors(model: GraphModule, own: Callable[[Tensor], Tensor]) -> None:
    """Put `own(tensor)` in the place of every parameter and buffer, of a tied one once. Without gradient: under
    torch.compile an operator without one fails where one is asked for. Changes `model`, not the tensors."""
    owned = replaced(_tensors_of(model), written_storages(model), own)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    value = owned[id(tensor)]
                    tensors[name] = value.requires_grad_(False) if isinstance(tensor, nn.Parameter) else value


def held_in_written_memory(model: GraphModule) -> dict[str, Tensor]:
    """The parameters and buffers, by every name, that lie in memory which the graph of `model` writes."""
    written = written_storages(model)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named if storage_of(tensor) in written}


def replaced(tensors: list[Tensor], written: set[int], own: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """id of each tensor -> `own` of it; of tensors in a storage that is `written`, views of `own` of that storage."""
    storages: dict[int, torch.UntypedStorage] = {}
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        key, values = storage_of(tensor), tensor.detach()
        if key not in written:
            value = own(values)
        else:
            if key not in storages:
                whole = torch.empty(0, dtype=torch.uint8, device=values.device).set_(values.untyped_storage())
                storages[key] = own(whole).untyped_storage()
            value = torch.empty(0, dtype=values.dtype, device=storages[key].device)
            value = value.set_(storages[key], values.storage_offset(), values.shape, values.stride())
        found[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    return found


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
