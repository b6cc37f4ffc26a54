"""The place in the module tree where a node was traced."""

from __future__ import annotations

import re

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.attributes import name_of
from pt2mx.fx.graph.calls import calls, placeholders


def module_calls(node: Node) -> list[tuple[str, str, str]]:
    """(an identity of the call, qualified name, qualified class name) of the modules around a node, outermost first;
    the root's name is ""."""
    stack = node.meta.get("nn_module_stack") or {}
    return [
        (call, _plain(name), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        for call, (name, kind) in stack.items()
    ]


def modules_of(node: Node) -> list[tuple[str, str]]:
    """(qualified name, qualified class name) of the modules around a node, outermost first."""
    return [(name, kind) for _, name, kind in module_calls(node)]


def module_name(node: Node) -> str:
    """Qualified name of the innermost module around a node."""
    return modules_of(node)[-1][0] if modules_of(node) else ""


def propagate_module_stack(model: GraphModule) -> None:
    """Give the nodes inside that do not know their module one: that of the parameter they read, inside the place of the
    call."""
    for call in calls(model):
        stack = call.node.meta.get("nn_module_stack") or {}
        operands = [operand for operand, _ in call.operands()]
        for _, graph in call.graphs:
            owners = {
                placeholder: name_of(operand).rpartition(".")[0]
                for placeholder, operand in zip(placeholders(graph), operands, strict=True)
                if isinstance(operand, Node) and operand.op == "get_attr" and "." in name_of(operand)
            }
            for node in graph.graph.nodes:
                if not node.meta.get("nn_module_stack"):
                    names = dict.fromkeys(owners[n] for n in node.all_input_nodes if n in owners)
                    node.meta["nn_module_stack"] = {**stack, **{name: (name, "") for name in names}}
            propagate_module_stack(graph)


def _plain(name: str) -> str:
    """`encoder.0.attn` for the `L['self'].encoder[0].attn` and `L['self']._modules['encoder'][0].attn` of strict
    export, also behind the `_export_root` of a graph inside; the name itself otherwise."""
    name = re.sub(r"^(L\['self'\]\.?)?(_export_root\b\.?)?", "", name)
    name = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", name)
    return ".".join(part for part in name.split(".") if part and part != "_modules")
