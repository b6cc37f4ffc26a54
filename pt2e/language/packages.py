"""Packages of a language model: its program compiled by AOTInductor for prompts and for single tokens, without weights.

Both are machine code alone. The weights stay in the folder's program, and are given to each call: they are stored once,
and lie in memory once.
"""

from __future__ import annotations

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

#: what is read -> how many tokens the program reads that is compiled for it
_LENGTHS = {"prompt": None, "token": 1}


def paths_in(folder: Path, device: torch.device) -> dict[str, Path]:
    """The packages of a folder for a device, by what they read."""
    return {what: folder / f"{what}.{device.type}.aoti.pt2" for what in _LENGTHS}


def write_packages(lowered: GraphModule, layers: Layers, device: torch.device, folder: Path) -> None:
    """Compile a lowered decoder for prompts of any length and for single tokens.

    Args:
        lowered: it stays as it is.
        layers: of its cache.
        device: that it runs on.
        folder: that the packages are written to.
    """
    model, weights = without_weights(lowered)
    for what, path in paths_in(folder, device).items():
        length = _LENGTHS[what]
        tokens = None if length is None else torch.zeros(2, length, dtype=torch.long)
        given = {**decoder.inputs(layers, device, tokens, slots=5), "weights": weights}
        with warnings.catch_warnings():
            # torch, of its own code
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
            program = decoder.export(model, given, length)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def load_packages(lowered: GraphModule, device: torch.device, folder: Path) -> dict[str, Callable[..., Tensor]]:
    """The packages of prompts and of single tokens, as they are called; none where there are none for the device.

    Raises:
        MXError: for packages that cannot be loaded.
    """
    paths = paths_in(folder, device)
    if not all(path.is_file() for path in paths.values()):
        return {}
    _, weights = without_weights(lowered)
    found: dict[str, Callable[..., Tensor]] = {}
    for what, path in paths.items():
        try:
            found[what] = _with(weights, torch._inductor.aoti_load_package(str(path)))
        except Exception as error:
            raise MXError(
                f"cannot load {str(path)!r}: {error}; remove it, or compile the folder again on this machine"
            ) from None
    return found


def _with(weights: list[Tensor], code: Callable[..., Any]) -> Callable[..., Tensor]:
    def call(**inputs: Any) -> Tensor:
        return code(**inputs, weights=weights)

    return call


def without_weights(lowered: GraphModule) -> tuple[GraphModule, list[Tensor]]:
    """A decoder that takes its parameters and buffers as a further input `weights`, and these."""
    model = copy_sharing_tensors(lowered)
    graph, weights = model.graph, []
    info = graph._codegen.pytree_info  # type: ignore[attr-defined]
    _, named = pytree.tree_unflatten(graph.find_nodes(op="placeholder"), info.in_spec)
    for node in graph.find_nodes(op="call_module", target="_guards_fn"):
        graph.erase_node(node)  # of the inputs that the program has
    last = graph.find_nodes(op="placeholder")[-1]
    named["weights"] = []
    for node in graph.find_nodes(op="get_attr"):
        weights.append(tensor_of(model, node))
        with graph.inserting_after(last):
            last = graph.placeholder(f"weight_{len(weights)}")
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        named["weights"].append(last)
    _, in_spec = pytree.tree_flatten(((), named))
    names = [*info.orig_args, "weights"]
    graph._codegen.pytree_info = info._replace(orig_args=names, in_spec=in_spec)  # type: ignore[attr-defined]
    delete_unused_tensors(model)
    model.recompile()
    return model, weights
