"""Packages of a language model: its program compiled by AOTInductor for prompts and for single tokens, without weights.

Both are machine code alone. The weights stay in the folder's program, and are given to each call: they are stored once,
and lie in memory once.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.attributes import tensor_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors, delete_unused_tensors
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.cache import Layers
from pt2mx.pt2e.language.graph_inputs import free_inputs, set_inputs
from pt2mx.pt2e.packages.load_check import check_loads

#: what is read -> how many tokens the program reads that is compiled for it
_LENGTHS = {"prompt": None, "token": 1}


def write_packages(lowered: GraphModule, layers: Layers, device: torch.device, folder: Path) -> list[Path]:
    """Compile a lowered decoder for prompts of any length and for single tokens. Gives the packages.

    Args:
        lowered: it stays as it is.
        layers: of its cache.
        device: that it runs on.
        folder: that the packages are written to.

    Raises:
        MXError: for machine code that crashes; none is left.
    """
    model, weights = without_weights(lowered)
    paths = _paths(model, device, folder)
    for what, path in paths.items():
        length = _LENGTHS[what]
        tokens = None if length is None else torch.zeros(2, length, dtype=torch.long)
        given = {**decoder.inputs(layers, device, tokens, slots=5), "weights": weights}
        with warnings.catch_warnings():
            # torch, of its own code
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
            program = decoder.export(model, given, length)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        try:
            check_loads(str(path), device)
        except MXError:
            for written in paths.values():
                written.unlink(missing_ok=True)
            raise
    return list(paths.values())


def load_packages(lowered: GraphModule, device: torch.device, folder: Path) -> dict[str, Callable[..., Tensor]]:
    """The packages of prompts and of single tokens, as they are called; none where there are none for the device.

    Raises:
        MXError: for packages that cannot be loaded.
    """
    if not any(folder.glob("*.aoti.pt2")):
        return {}
    model, weights = without_weights(lowered)
    paths = _paths(model, device, folder)
    if not all(path.is_file() for path in paths.values()):
        return {}
    found: dict[str, Callable[..., Tensor]] = {}
    for what, path in paths.items():
        try:
            found[what] = _with(weights, torch._inductor.aoti_load_package(str(path)))
        except Exception as error:
            raise MXError(
                f"cannot load {str(path)!r}: {error}; remove it, or compile the folder again on this machine"
            ) from None
    return found


def _paths(model: GraphModule, device: torch.device, folder: Path) -> dict[str, Path]:
    """The packages for a device, by what they read. Their names tell of which program they are."""
    digest = hashlib.sha256(model.code.encode()).hexdigest()[:8]
    return {what: folder / f"{what}.{device.type}.{digest}.aoti.pt2" for what in _LENGTHS}


def _with(weights: list[Tensor], code: Callable[..., Any]) -> Callable[..., Tensor]:
    def call(keys: list[Any], values: list[Any], **inputs: Tensor) -> Tensor:
        # machine code asks nothing: it reads what it is given as the contiguous int64 that it was compiled for
        read = {name: value.to(torch.int64).contiguous() for name, value in inputs.items()}
        if not all(tensor.is_contiguous() for tensor in pytree.tree_leaves((keys, values))):
            raise MXError("the cache is not contiguous: give what new_cache or a call gave")
        return code(**read, keys=keys, values=values, weights=weights)

    return call


def without_weights(lowered: GraphModule) -> tuple[GraphModule, list[Tensor]]:
    """A decoder that takes its parameters and buffers as a further input `weights`, and these."""
    model = copy_sharing_tensors(lowered)
    graph, named, weights = model.graph, {**free_inputs(model), "weights": []}, []
    last = graph.find_nodes(op="placeholder")[-1]
    for node in graph.find_nodes(op="get_attr"):
        weights.append(tensor_of(model, node))
        with graph.inserting_after(last):
            last = graph.placeholder(f"weight_{len(weights)}")
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        named["weights"].append(last)
    set_inputs(model, named)
    delete_unused_tensors(model)
    return model, weights
