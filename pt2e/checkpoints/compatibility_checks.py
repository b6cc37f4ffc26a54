"""Checks that the libraries which load a layout find and compute its experts, made before the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.checkpoint_names import experts_in_one_tensor
from pt2mx.pt2e.checkpoints.layouts import Layout
from pt2mx.pt2e.checkpoints.module_schemes import EXPERTS, LINEAR, Module, most_common

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: experts that transformers (5.17) turns into linear layers before it loads weights of compressed-tensors
_SPLIT = "Llama4TextExperts"


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
    if first.scheme is None and linear and linear[0].element != "fp8_e4m3":
        raise MXError(f"transformers takes {name} to be packed as linear layers are: quantize experts too")
    if first.scheme is not None and first.scheme.element == "fp8_e4m3":
        raise MXError(f"transformers reads experts in FP8 with one scale a row: give {name} another format")
