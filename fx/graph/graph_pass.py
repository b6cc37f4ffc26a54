"""Graph passes: functions that change the graph of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from torch.fx import GraphModule


class GraphPass:
    """A change of a graph. Called by itself it changes the model, compiles its code anew and returns it.

    Args:
        edit: (model, **options) -> None. It changes `model.graph`, and parameters, buffers and submodules.
    """

    def __init__(self, edit: Callable[..., None]) -> None:
        self.edit = edit
        functools.update_wrapper(self, edit)

    def __call__(self, model: GraphModule, **options: object) -> GraphModule:
        self.edit(model, **options)
        model.recompile()
        return model


def run_passes(model: GraphModule, passes: Iterable[GraphPass]) -> None:
    """Run passes over one graph, in order, and compile its code once."""
    for graph_pass in passes:
        graph_pass.edit(model)
    model.recompile()
