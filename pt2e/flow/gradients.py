"""`gradient` of a config: the operators of a model prepared for training whose gradients are quantized, and how."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import called, name_of
from pt2mx.fx.training.gradients import GRADIENTS_KEY, GradientFormat, quantized_gradients
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.quantizer.operators import CONFIG_KEY, is_matmul_like, quantizable_operators
from pt2mx.spec import MXSpec


def plan_gradients(graphs: Iterable[GraphModule]) -> list[str]:
    """Note in the meta of quantized operators how their gradients are quantized, where a config names a format. Return
    the names of those whose gradients stay in high precision all the same."""
    left = []
    for graph in graphs:
        for node in quantizable_operators(graph.graph):
            config = node.meta.get(CONFIG_KEY)
            specs = _specs(graph, node)
            if config is None or config.gradient is None or not specs or not is_matmul_like(called(node)):
                continue
            how = GradientFormat(config.gradient, config.gradient_hadamard, config.activation)
            gradients = quantized_gradients(node, how, specs)
            if gradients is None:
                left.append(node.name)
            else:
                node.meta[GRADIENTS_KEY] = gradients
    return left


def _specs(graph: GraphModule, node: Node) -> dict[Node, MXSpec]:
    """Return the specs of the arguments that are quantized."""
    called_modules = {n: graph.get_submodule(name_of(n)) for n in node.all_input_nodes if n.op == "call_module"}
    return {n: module.spec for n, module in called_modules.items() if isinstance(module, MXFakeQuantize)}
