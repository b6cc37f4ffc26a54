"""The modules of a float model that have weights, by kind, and parameters that are one."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from torch import nn

from pt2mx.pt2e.checkpoints.schemes import EMBEDDING, EXPERTS, LINEAR

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def weights_of(model: nn.Module) -> dict[str, str]:
    """Parameter (..., N, K) -> the kind of its module: `LINEAR`, `EMBEDDING`, `EXPERTS`, or the name of its class."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not name.endswith("_bias"):
                found[f"{path}.{name}" if path else name] = _kind(module, parameter)
    return found


def _kind(module: nn.Module, parameter: nn.Parameter) -> str:
    if are_experts(module) and parameter.dim() == 3:
        return EXPERTS
    if type(module) is nn.Linear:  # readers know no subclass
        return LINEAR
    return EMBEDDING if isinstance(module, nn.Embedding) else type(module).__name__


def are_experts(module: nn.Module) -> bool:
    """True of a module of transformers that holds the weights of all experts of a layer, (experts, ..., ...) each."""
    return hasattr(module, "is_transposed")


def is_transposed(model: nn.Module, weight: str) -> bool:
    """True of experts whose parameter is (E, K, N), as gpt-oss has them."""
    return bool(getattr(model.get_submodule(weight.rpartition(".")[0]), "is_transposed", False))


def tied_names(model: PreTrainedModel) -> dict[str, set[str]]:
    """Name of a parameter -> all names that it has, where it has several. On the meta device they are parameters apart,
    and transformers names those that it will tie."""
    groups: dict[object, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].add(name)
    for name, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        groups[name] |= {name, other}
    return {name: names for names in groups.values() if len(names) > 1 for name in names}
