"""Limits of the readers of a layout, which the layout could go beyond: checked before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.layouts import Layout
from pt2mx.pt2e.checkpoints.schemes import EXPERTS, LINEAR, Module, commonest


def check_readers(layout: Layout, modules: Mapping[str, Module], whole: Collection[str]) -> None:
    """Raise an error for experts that readers would not find or not compute with as they are.

    Args:
        layout: of the checkpoint.
        modules: of the model, by name.
        whole: those whose experts are one tensor in the checkpoint, too, as in gpt-oss.

    Raises:
        MXError: naming a module.
    """
    experts = {name: module for name, module in modules.items() if module.kind == EXPERTS}
    for name, module in experts.items():
        if module.scheme is None:
            continue
        if module.scheme.inputs is not None:
            raise MXError(f"readers of checkpoints quantize no inputs of experts: leave those of {name} alone")
        if layout.only_experts and name not in whole:
            raise MXError(f"{layout.name} is read for gpt-oss alone, whose experts are one tensor: {name} are several")
        if name in whole and not layout.only_experts:
            raise MXError(f"{layout.name} has no place for {name}, experts in one tensor: the layout mxfp4 has")
    merged = {name: module for name, module in experts.items() if name not in whole}
    if layout.name == "compressed-tensors" and merged:
        _check_compressed_tensors(merged, modules)


def _check_compressed_tensors(experts: Mapping[str, Module], modules: Mapping[str, Module]) -> None:
    """transformers (5.17) makes one parameter of experts when it loads, by one scheme for all."""
    (name, first), *_ = experts.items()
    if any(module.scheme != first.scheme for module in experts.values()):
        raise MXError(f"transformers reads all experts in one format: {name} and others differ")
    linear = commonest(module for module in modules.values() if module.kind == LINEAR)
    if first.scheme is None and linear and linear[0].element != "fp8_e4m3":
        raise MXError(f"transformers takes {name} to be packed as linear layers are: quantize experts too")
    if first.scheme is not None and first.scheme.element == "fp8_e4m3":
        raise MXError(f"transformers reads experts in FP8 with one scale a row: give {name} another format")
