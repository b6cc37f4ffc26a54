"""Removal of what a graph no longer reads. Graphs inside the graph keep all that is theirs."""

import torch
from torch.fx import GraphModule, Node


def delete_unused_tensors(model: GraphModule) -> None:
    """Delete the parameters and buffers that no `get_attr` of the graph reads, and empty modules."""
    read = {node.target for node in model.graph.find_nodes(op="get_attr")}
    for path, module in _own_modules(model):
        for name in [*module._parameters, *module._buffers]:
            if (f"{path}.{name}" if path else name) not in read:
                delattr(module, name)
    delete_unused_modules(model)


def erase_unread(node: Node) -> None:
    """Erase a node that nothing reads, and what was computed for it alone."""
    if node.users or node.op not in ("call_function", "get_attr") or node.is_impure():
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for n in inputs:
        erase_unread(n)


def delete_unused_modules(model: GraphModule) -> None:
    """Delete the submodules that the graph neither calls nor reads anything of."""
    targets = [node.target for node in model.graph.nodes if node.op in ("call_module", "get_attr")]
    used = {target[:end] for target in targets for end in _ends(target)}
    for path, _ in _own_modules(model):
        if path and path not in used and path.rpartition(".")[0] in {"", *used}:
            model.delete_submodule(path)


def _ends(path: str) -> list[int]:
    return [i for i, character in enumerate(path) if character == "."] + [len(path)]


def _own_modules(model: GraphModule) -> list[tuple[str, torch.nn.Module]]:
    """The model and its submodules by path, but for what is inside a module that the graph calls or passes on."""
    closed = {node.target for node in model.graph.nodes if node.op in ("call_module", "get_attr")}
    modules = list(model.named_modules(remove_duplicate=False))
    return [(path, module) for path, module in modules if not any(path[:end] in closed for end in _ends(path)[:-1])]
