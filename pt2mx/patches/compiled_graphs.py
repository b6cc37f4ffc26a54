"""Intercept the calls of the graphs that Inductor compiled.

`torch.compile` gives a program no access to them: its guards choose the graph of each call. A torch that hands out the
graph which it runs needs no patch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._inductor.output_code import CompiledFxGraph

from pt2mx.patches.replaced import replaced

#: graph, inputs, torch's own call -> what the graph returns
Call = Callable[[CompiledFxGraph, list[Any], Callable[[], Any]], Any]


def intercepted_graphs(call: Call) -> AbstractContextManager[None]:
    """Call `call` in place of each compiled graph that this thread calls within the context."""
    thread = threading.get_ident()

    def intercepting(run: Callable[..., Any]) -> Callable[..., Any]:
        def intercepted(graph: CompiledFxGraph, inputs: list[Any]) -> Any:
            if threading.get_ident() != thread:
                return run(graph, inputs)
            return call(graph, inputs, lambda: run(graph, inputs))

        return intercepted

    return replaced(CompiledFxGraph, "__call__", intercepting)
