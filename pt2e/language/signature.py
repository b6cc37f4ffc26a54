"""The named inputs of a program, and of its graph: read them, and change them."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree


def example_inputs(program: ExportedProgram) -> dict[str, Any]:
    """Return the inputs of a program: name -> fake tensor, or nested lists of fake tensors."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    inputs = [values[name] for name in program.graph_signature.user_inputs]
    _, named = pytree.tree_unflatten(inputs, program.call_spec.in_spec)
    return named


def inputs_of(model: GraphModule) -> dict[str, Any]:
    """Return the inputs of a decoder's graph: name -> placeholder, or nested lists of placeholders."""
    info = model.graph._codegen.pytree_info  # type: ignore[attr-defined]
    _, named = pytree.tree_unflatten(model.graph.find_nodes(op="placeholder"), info.in_spec)
    return named


def free_inputs(model: GraphModule) -> dict[str, Any]:
    """Remove the checks of a graph's inputs, so that they can change, and return the inputs as `inputs_of` does."""
    for node in model.graph.find_nodes(op="call_module", target="_guards_fn"):
        model.graph.erase_node(node)
    return inputs_of(model)


def set_inputs(model: GraphModule, named: dict[str, Any]) -> None:
    """Set the signature of a graph: its placeholders by name, in this order."""
    codegen = model.graph._codegen
    _, in_spec = pytree.tree_flatten(((), named))
    codegen.pytree_info = codegen.pytree_info._replace(  # type: ignore[attr-defined]
        orig_args=list(named), in_spec=in_spec
    )
    model.recompile()
