"""Run a graph so that gradients pass: Python executes its conditions and loops instead of their operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.pt2e.debug.interpreter import OnValue, RecordingInterpreter


def _cond(chosen: Any, true: Any, false: Any, operands: Sequence[Any]) -> Any:
    return (true if chosen else false)(*operands)


def _while_loop(condition: Any, body: Any, carried: Sequence[Any], fixed: Sequence[Any]) -> Any:
    while condition(*carried, *fixed):
        carried = body(*carried, *fixed)
    return tuple(carried)


def _scan(step: Any, carried: Sequence[Any], slices: Sequence[Tensor], fixed: Sequence[Any]) -> Any:
    made = []
    for each in zip(*slices, strict=True):
        results = step(*carried, *each, *fixed)
        carried = results[: len(carried)]
        made.append(results[len(carried) :])
    return (*carried, *map(torch.stack, zip(*made, strict=True)))


def _map(each: Any, slices: Sequence[Tensor], fixed: Sequence[Any]) -> Any:
    made = [each(*one, *fixed) for one in zip(*slices, strict=True)]
    return tuple(map(torch.stack, zip(*made, strict=True)))


def _autocast(device: str, dtype: Any, enabled: bool, cache_enabled: bool, graph: Any, *operands: Any) -> Any:
    with torch.autocast(device, dtype, enabled, cache_enabled):
        return graph(*operands)


#: higher-order operator -> the function that runs its subgraphs
_RUN: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "wrap_with_autocast": _autocast,
    "wrap_with_set_grad_enabled": lambda enabled, graph, *operands: graph(*operands),
    "tag_activation_checkpoint": lambda graph, *operands, **options: graph(*operands),
    "hints_wrapper": lambda graph, operands, options, **hints: graph(*operands),
    "invoke_subgraph": lambda graph, name, *operands: graph(*operands),
}


class EagerControlFlow(RecordingInterpreter):
    """A run that adds a zero to each probed value: the zero has the gradient of the value.

    Args:
        probed: the keys of these values.
        probes: collects the zeros, by key, in the order of the calls.
    """

    def __init__(
        self, model: GraphModule, on_value: OnValue, probed: set[str], probes: dict[str, list[Tensor]], path: str = ""
    ) -> None:
        super().__init__(model, on_value, path)
        self.probed, self.probes = probed, probes

    def of_subgraph(self, subgraph: GraphModule, path: str) -> RecordingInterpreter:
        """Return the interpreter of a subgraph."""
        return EagerControlFlow(subgraph, self.on_value, self.probed, self.probes, path)

    def computed(self, node: Node) -> Any:
        """Return the value of a node, plus a zero if it is probed."""
        value = super().computed(node)
        key = self.keys.get(node)
        if key in self.probed and isinstance(value, Tensor) and value.is_floating_point():
            self.probes.setdefault(key, []).append(torch.zeros_like(value, requires_grad=True))
            return value + self.probes[key][-1]
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; execute conditions and loops in Python.

        Raises:
            MXError: for an unknown higher-order operator.
        """
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        if target.name() not in _RUN:
            raise MXError(f"no gradients pass through {target.name()}: give method='forward'")
        return _RUN[target.name()](*args, **kwargs)
