"""Look up the parameters, buffers and submodules that the nodes of a graph module name."""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import Graph, GraphModule, Node


def model_of(graph: Graph) -> GraphModule:
    """Return the graph module that owns a graph."""
    if graph.owning_module is None:
        raise ValueError("a graph that is of no graph module has no parameters")
    return graph.owning_module


def name_of(node: Node) -> str:
    """Return the qualified name of the attribute that a `get_attr` node reads, or of the module that a `call_module`
    node calls."""
    if not isinstance(node.target, str):
        raise TypeError(f"{node} ({node.op}) names no attribute")
    return node.target


def attribute_of(model: GraphModule, node: Node) -> object:
    """Return the parameter, buffer or submodule that a `get_attr` node reads."""
    return operator.attrgetter(name_of(node))(model)


def tensor_of(model: GraphModule, node: Node) -> Tensor:
    """Return the parameter or buffer that a `get_attr` node reads."""
    tensor = attribute_of(model, node)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{node} reads no tensor but a {type(tensor).__name__}")
    return tensor


def register_buffer(model: GraphModule, name: str, value: Tensor) -> str:
    """Register a buffer under a qualified name, with a number if the name is taken, and return the name."""
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    unique = free_name(owner, attribute)
    owner.register_buffer(unique, value)
    return f"{path}.{unique}" if path else unique


def free_name(owner: object, name: str) -> str:
    """Return the name, with a number if `owner` has such an attribute."""
    unique, number = name, 0
    while hasattr(owner, unique):
        number += 1
        unique = f"{name}_{number}"
    return unique
