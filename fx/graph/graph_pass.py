"""Graph passes: functions that change the graph of a model.

With `PT2MX_LOG=passes`, each pass that runs prints to stderr what it changed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable

from torch._ops import OpOverload
from torch.fx import GraphModule

from pt2mx.fx.graph.node import OperatorCall

#: an operator, or the `OperatorCall` class of its calls
Operator = OpOverload | type[OperatorCall]


class GraphPass:
    """A function that changes a graph. Calling the pass changes the model, recompiles its code and returns it.

    Args:
        edit: (model, **options) -> None. It may change `model.graph`, parameters, buffers and submodules.
        reads: the pass runs only on graphs that call each of these operators; from a tuple, one operator suffices. An
            operator that is listed twice must be called twice.
    """

    def __init__(self, edit: Callable[..., None], reads: Iterable[Operator | tuple[Operator, ...]] = ()) -> None:
        self.edit = edit
        self._reads = Counter(one_of if isinstance(one_of, tuple) else (one_of,) for one_of in reads)
        functools.update_wrapper(self, edit)

    def __call__(self, model: GraphModule, **options: object) -> GraphModule:
        run_passes(model, [self], **options)
        return model

    def applies_to(self, model: GraphModule) -> bool:
        """Return whether the graph calls the operators in `reads`, by torch.fx's index of calls."""
        calls = functools.partial(model.graph.find_nodes, op="call_function", sort=False)
        return all(
            sum(len(calls(target=getattr(one, "overload", one))) for one in one_of) >= count
            for one_of, count in self._reads.items()
        )


def graph_pass(*reads: Operator | tuple[Operator, ...]) -> Callable[[Callable[..., None]], GraphPass]:
    """Decorate a function as a `GraphPass` that reads these operators."""
    return functools.partial(GraphPass, reads=reads)


def run_passes(model: GraphModule, passes: Iterable[GraphPass], **options: object) -> None:
    """Run the passes that apply to a graph, in order, and recompile its code once."""
    logs = "passes" in os.environ.get("PT2MX_LOG", "").split(",")
    for graph_pass in passes:
        if graph_pass.applies_to(model):
            before = _operators(model) if logs else None
            graph_pass.edit(model, **options)
            if before is not None:
                _log(graph_pass.__name__, before, _operators(model))  # type: ignore[attr-defined]
    model.recompile()


def _operators(model: GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in model.graph.nodes if node.op in ("call_function", "call_module"))


def _log(name: str, before: Counter[str], after: Counter[str]) -> None:
    counts = {operator: after[operator] - before[operator] for operator in sorted(before | after)}
    changes = ", ".join(f"{operator} {count:+}" for operator, count in counts.items() if count)
    print(f"pt2mx: {name}: {changes or 'no operator'}", file=sys.stderr)
