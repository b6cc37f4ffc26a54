"""The inputs of a decoder's graph by name, nested as it is called with them."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule
from torch.utils import _pytree as pytree


def inputs_of(model: GraphModule) -> dict[str, Any]:
    """Name -> placeholder, or lists of such."""
    info = model.graph._codegen.pytree_info  # type: ignore[attr-defined]
    _, named = pytree.tree_unflatten(model.graph.find_nodes(op="placeholder"), info.in_spec)
    return named


def free_inputs(model: GraphModule) -> dict[str, Any]:
    """The same of a graph whose inputs are about to change: nothing checks them any more, until an export does."""
    for node in model.graph.find_nodes(op="call_module", target="_guards_fn"):
        model.graph.erase_node(node)
    return inputs_of(model)


def set_inputs(model: GraphModule, named: dict[str, Any]) -> None:
    """Have a graph be called with these, which are its placeholders in this order."""
    codegen = model.graph._codegen
    _, in_spec = pytree.tree_flatten(((), named))
    codegen.pytree_info = codegen.pytree_info._replace(  # type: ignore[attr-defined]
        orig_args=list(named), in_spec=in_spec
    )
    model.recompile()
