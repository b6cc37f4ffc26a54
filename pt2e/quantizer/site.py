"""A site: one call of a quantizable operator, as settings see it, wherever it was found.

Settings match sites alone. So one recipe means the same in an exported graph (`sites_of` here), in the modules of a
model whose checkpoint is converted (`pt2mx.pt2e.checkpoints.select_weights`), and in an ONNX file
(`pt2mx.pt2e.onnx.quantize.plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from pt2mx.fx.graph.node import called, value_of
from pt2mx.fx.graph.source_node import module_calls
from pt2mx.pt2e.quantizer.operators import operand_node, operands_of, operator_name

#: a call of a module or operator: the module that makes it, the class or operator, its number among such calls
Call = tuple[str, str, int]


@dataclass(frozen=True)
class Site:
    """One call of a quantizable operator.

    Args:
        operator: the name of the operator, such as "aten.linear".
        path: the names of the modules around the call, outermost first.
        module_types: the qualified names of their classes.
        order: the calls of these modules, and the operator's own call.
        parameters: the number of values of the operator's largest weight; 0 without one.
        call: the call itself, which a filter function gets: a node of a graph or of an ONNX file, or a module.
    """

    operator: str
    path: tuple[str, ...] = ()
    module_types: tuple[str, ...] = ()
    order: tuple[Call, ...] = ()
    parameters: int = 0
    call: object = field(default=None, compare=False)


class CallNumbers:
    """Numbers the calls that modules make, in the order in which it is asked: first come, first numbered."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def order(self, modules: Sequence[tuple[Hashable, str, str]], call: Hashable, operator: str) -> tuple[Call, ...]:
        """Return the numbered calls around an operator, and its own, which the innermost module makes.

        Args:
            modules: (key of the call, name, class) of the modules around it, outermost first. A module's parent by name
                calls it, and nobody calls the root, whose name is "".
            call: the key of the operator's call. A key that comes again keeps its number.
            operator: the name of the operator.
        """
        calls = [self._numbered(key, name.rpartition(".")[0], kind) for key, name, kind in modules if name]
        caller = modules[-1][1] if modules else ""
        return (*calls, self._numbered(call, caller, operator))

    def _numbered(self, key: Hashable, caller: str, kind: str) -> Call:
        if key not in self._numbers:
            self._numbers[key] = self._counts[caller, kind]
            self._counts[caller, kind] += 1
        return caller, kind, self._numbers[key]


def number_calls(nodes: Iterable[Node]) -> dict[Node, tuple[Call, ...]]:
    """Return the numbered calls around every node of a graph.

    Args:
        nodes: all nodes in the order of execution. One that occurs twice counts once.
    """
    numbers = CallNumbers()
    return {node: numbers.order(module_calls(node), node, operator_name(called(node))) for node in nodes}


def sites_of(nodes: Iterable[Node], constants: set[Node], calls: Mapping[Node, tuple[Call, ...]]) -> dict[Node, Site]:
    """Return the sites of the calls of quantizable operators in an exported graph.

    Args:
        nodes: the calls.
        constants: the constant nodes of the graph and its subgraphs.
        calls: as `number_calls` returns them; empty where no setting asks for them.
    """
    sites = {}
    for node in nodes:
        modules = module_calls(node)
        sites[node] = Site(
            operator=operator_name(called(node)),
            path=tuple(name for _, name, _ in modules),
            module_types=tuple(kind for _, _, kind in modules),
            order=calls.get(node, ()),
            parameters=_parameters(node, constants),
            call=node,
        )
    return sites


def _parameters(node: Node, constants: set[Node]) -> int:
    """Return the number of values of the largest weight of an operator; 0 without one."""
    largest = 0
    for operand in operands_of(node):
        weight = operand_node(node, operand) if operand.role in ("weight", "operand") else None
        if weight in constants:
            value = value_of(weight)
            if isinstance(value, torch.Tensor):
                largest = max(largest, value.numel())
    return largest
