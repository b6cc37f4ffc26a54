"""Move a program to another device: its tensors, and the devices that its graph names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.tensors import map_tensors


def move_to_device(model: GraphModule, device: torch.device) -> GraphModule:
    """Move a model and its subgraphs to `device`.

    This changes parameters and buffers, `val` meta, and the device arguments of factories, casts, assertions and
    autocast. Tensors already on the device are shared. Changes `model` and returns it.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return device if isinstance(value, torch.device) else value

    map_tensors(model, moved)
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
            if node.target is torch.ops.higher_order.wrap_with_autocast:
                node.args = (device.type, *node.args[1:])
            if "val" in node.meta:
                node.meta["val"] = map_aggregate(node.meta["val"], moved)
        graph.recompile()
    return model


def device_named(device: torch.device | str) -> torch.device:
    """Return `device` with its index, because the assertions of an exported graph compare the index too."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        raise MXError(
            f"device={device!r} must be a torch.device that this torch can use, or its name, such as 'cpu' or"
            f" 'cuda:0': {str(error).splitlines()[0]}"
        ) from None
