"""Graph passes: functions that change the graph of a model.

`PT2MX_LOG=passes` has each pass say on stderr what it changed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable

from torch.fx import GraphModule


class GraphPass:
    """A change of a graph. Called by itself it changes the model, compiles its code anew and returns it.

    Args:
        edit: (model, **options) -> None. It changes `model.graph`, and parameters, buffers and submodules.
    """

    def __init__(self, edit: Callable[..., None]) -> None:
        self._edit = edit
        functools.update_wrapper(self, edit)

    def __call__(self, model: GraphModule, **options: object) -> GraphModule:
        self.edit(model, **options)
        model.recompile()
        return model

    def edit(self, model: GraphModule, **options: object) -> None:
        """Change the model, whose code is not compiled anew."""
        if "passes" not in os.environ.get("PT2MX_LOG", "").split(","):
            return self._edit(model, **options)
        before = _operators(model)
        self._edit(model, **options)
        after = _operators(model)
        counts = {name: after[name] - before[name] for name in sorted(before | after)}
        changes = ", ".join(f"{name} {count:+}" for name, count in counts.items() if count)
        print(f"pt2mx: {self.__name__}: {changes or 'no operator'}", file=sys.stderr)  # type: ignore[attr-defined]


def run_passes(model: GraphModule, passes: Iterable[GraphPass]) -> None:
    """Run passes over one graph, in order, and compile its code once."""
    for graph_pass in passes:
        graph_pass.edit(model)
    model.recompile()


def _operators(model: GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in model.graph.nodes if node.op in ("call_function", "call_module"))
