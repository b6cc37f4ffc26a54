"""Queries about the calls and tensors of a graph."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.higher_order_ops import graph_modules


def calls(model: GraphModule, *targets: Callable) -> list[Node]:
    """Return the calls of these targets, or of all, in the graph itself, in order."""
    nodes = [node for node in model.graph.nodes if node.op == "call_function"]
    return [node for node in nodes if node.target in targets] if targets else nodes


def called(model: GraphModule) -> list[Callable]:
    """Return the targets of the calls in the graph itself, in order."""
    return [node.target for node in calls(model)]


def count(model: GraphModule, target: Callable) -> int:
    """Count the calls of a target in the graph and its subgraphs."""
    return sum(len(calls(graph, target)) for graph in graph_modules(model))


def namespaces(model: GraphModule) -> set[str]:
    """Return the namespaces of the operators that the graph and its subgraphs call."""
    targets = {target for graph in graph_modules(model) for target in called(graph)}
    return {target.namespace for target in targets if isinstance(target, OpOverload)}


def quantized_at_each_call(model: GraphModule) -> set[str]:
    """Return the parameters that quantizing operators of any library read."""
    quantize = [n for n in calls(model) if "::quantize_" in str(getattr(n.target, "_schema", ""))]
    return {n.args[0].target for n in quantize if n.args[0].op == "get_attr"}


def snapshot(model: GraphModule) -> tuple[str, dict[str, tuple[Tensor, bool]]]:
    """Return the code of a model, and copies of its tensors with their `requires_grad`."""
    return model.code, {n: (t.clone(), t.requires_grad) for n, t in [*model.named_parameters(), *model.named_buffers()]}


def assert_unchanged(model: GraphModule, before: tuple[str, dict[str, tuple[Tensor, bool]]]) -> None:
    """Check that a model equals its snapshot."""
    code, tensors = snapshot(model)
    assert code == before[0] and tensors.keys() == before[1].keys()
    for name, (value, requires_grad) in tensors.items():
        assert torch.equal(value, before[1][name][0]) and requires_grad == before[1][name][1]


def graph_after_sin(function: Callable[..., object]) -> tuple[GraphModule, Node]:
    """Return the graph of `function(torch.sin(x))`, x: (4, 6), and the node of the sine."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return function(torch.sin(x))

    model = torch.export.export(Model(), (torch.randn(4, 6),)).module()
    (node,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    return model, node
