"""Delay the code of a copied graph until its last change: torch.fx generates code after each."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import CodeGen, PythonCode

from pt2mx.fx.graph.higher_order_ops import graph_modules

T = TypeVar("T", bound=nn.Module)


class _NoCode(CodeGen):
    """Generates an empty function, which takes no time.

    Args:
        final: what generates the code after the last change.
    """

    def __init__(self, final: CodeGen) -> None:
        super().__init__()
        self.final = final

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> PythonCode:
        return Graph().python_code("self")


def delay_code(graph: Graph) -> None:
    """Generate no code for a graph until `generate_code`. The graph must belong to no module of the user."""
    graph.set_codegen(_NoCode(graph._codegen))


def generate_code(model: GraphModule) -> GraphModule:
    """Generate the code of a model whose code is delayed. Changes `model` and returns it."""
    graphs = graph_modules(model)
    for graph in graphs:
        codegen = graph.graph._codegen
        if isinstance(codegen, _NoCode):
            graph.graph.set_codegen(codegen.final)
    for graph in graphs:
        graph.recompile()
    return model
