"""The graphs inside a graph: branches and bodies of higher-order operators."""

from collections.abc import Iterator

from torch.fx import GraphModule


def graph_modules(model: GraphModule, path: str = "") -> Iterator[tuple[str, GraphModule]]:
    """(qualified name, graph module) of the model, whose name is "", and of every graph module that a `get_attr` node
    of it names (`torch.cond`, `while_loop`, `scan`, a region without gradients), each once, outer ones first."""
    yield path, model
    for name in dict.fromkeys(node.target for node in model.graph.find_nodes(op="get_attr")):
        nested = _attribute(model, name)
        if isinstance(nested, GraphModule):
            yield from graph_modules(nested, f"{path}.{name}" if path else name)


def _attribute(model: GraphModule, name: str) -> object:
    value = model
    for part in name.split("."):
        value = getattr(value, part)
    return value
