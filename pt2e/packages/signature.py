"""The input signature of a model: the nesting, dtypes and shapes of its inputs, which arguments are compared with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.pt2e.packages.pytree_args import (
    check_leaf,
    check_shared_memory,
    flatten_by_name,
    in_memory_order,
    memory_order,
)
from pt2mx.pt2e.program.sizes import (
    Range,
    condition_variables,
    guards,
    input_nodes,
    parameter_names,
    ranges,
    relations,
)


@dataclass(frozen=True)
class Signature:
    """An example of a call, and the conditions on each leaf of its arguments. Packages store these fields.

    Args:
        args: positional arguments of the example: trees of tensors on the CPU, and of constants.
        kwargs: its keyword arguments.
        names: a name of each leaf.
        ranges: for each tensor the ranges of its dimensions; for a number that a call may change its own range, as a
            list of one; None for a constant.
        parameters: the names of the positional arguments.
        guards: further conditions, as `pt2mx.pt2e.program.sizes` writes them.
        written: the names of the leaves that a call writes to.
        numbers: the indices of the output leaves that are numbers.
    """

    args: tuple
    kwargs: dict
    names: list[str]
    ranges: list[list[Range] | None]
    parameters: list[str]
    guards: list[str]
    written: list[str]
    numbers: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, program: ExportedProgram, module: GraphModule, lower: Mapping | None = None, conditions: Iterable[str] = ()
    ) -> Signature:
        """Return the signature of a program with example inputs, made of `module`; `lower` is as `ranges` takes it."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), program.example_inputs)
        nodes, written = input_nodes(program), written_nodes(program.graph)
        return cls(
            args,
            kwargs,
            names=[node.name for node in nodes],
            ranges=ranges(program, lower),
            parameters=parameter_names(module, len(args)),
            guards=[*relations(program), *guards(program), *conditions],
            written=[node.name for node in nodes if node in written],
            numbers=_numbers(program),
        )

    @cached_property
    def inputs(self) -> list[tuple[str, object, list[Range] | None]]:
        """Return the (name, example, ranges) of each leaf."""
        return list(zip(self.names, self._flat[0], self.ranges, strict=True))

    @cached_property
    def trees(self) -> dict[str, object]:
        """Return the arguments by their names, each with the names of its leaves instead of their values."""
        args, kwargs = self.unflatten(self.names)
        return {**dict(zip(self.parameters, args, strict=True)), **kwargs}

    def unflatten(self, leaves: Sequence[object]) -> tuple[tuple, dict]:
        """Return the arguments, positional and keyword, with these leaves."""
        return pytree.tree_unflatten(leaves, self._flat[1])

    def checked(self, args: tuple, kwargs: dict, device: torch.device | None = None) -> tuple[tuple, dict]:
        """Check the arguments of a call, and return them as compiled code reads them: with the strides of the example.

        Tensors with other strides are copied. By default a tensor may be on any device.
        """
        by_parameter = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(self.trees) or by_parameter.keys() != self.trees.keys():
            raise MXError(f"call it with {self._expected}: given are {_described(args, kwargs)}")
        named: dict[str, object] = {}
        for parameter, tree in self.trees.items():
            named.update(flatten_by_name(by_parameter[parameter], tree, f"the argument {parameter!r}"))
        leaves = [named[name] for name in self.names]
        for leaf, (name, example, sizes) in zip(leaves, self.inputs, strict=True):
            check_leaf(name, leaf, example, sizes, device)
        if self.written:
            check_shared_memory(named, self.written)
        arranged = list(map(self._arranged, self.names, leaves, self._orders))
        args, kwargs = self.unflatten(arranged)
        if self._conditions:
            self._check_conditions(condition_variables(arranged, self.parameters, args, kwargs))
        return args, kwargs

    def returned(self, outputs: object) -> object:
        """Return the outputs of compiled code as the model returns them: numbers are tensors in compiled code."""
        leaves, tree = pytree.tree_flatten(outputs)
        for i in self.numbers:
            leaves[i] = leaves[i].item()
        return pytree.tree_unflatten(leaves, tree) if self.numbers else outputs

    def _check_conditions(self, arguments: dict[str, object]) -> None:
        for condition, holds in self._conditions:
            try:
                met = holds(arguments)
            except ZeroDivisionError:
                met = False
            if not met:
                raise MXError(f"the shapes of the inputs must meet the condition {self._readable(condition)}")

    def _arranged(self, name: str, leaf: object, order: list[int] | None) -> object:
        """Return a tensor with its dimensions in this order in memory, without gaps, as a copy only where necessary.
        Another leaf has no order."""
        if order is None or not isinstance(leaf, Tensor):
            return leaf
        if leaf.permute(order).is_contiguous() and not leaf.is_neg():
            return leaf
        if name in self.written:
            raise MXError(f"the input {name!r} is written to: pass it with the strides of the example")
        return in_memory_order(leaf.resolve_neg(), order)

    @cached_property
    def _flat(self) -> tuple[list[object], pytree.TreeSpec]:
        return pytree.tree_flatten((self.args, self.kwargs))

    @cached_property
    def _orders(self) -> list[list[int] | None]:
        return [memory_order(leaf) if isinstance(leaf, Tensor) else None for leaf in self._flat[0]]

    @cached_property
    def _conditions(self) -> list[tuple[str, Callable[[dict], bool]]]:
        # eval is no risk: the conditions come from the file that also has the machine code
        return [(condition, eval(f"lambda L: {condition}", dict(SYMPY_INTERP))) for condition in self.guards]

    def _readable(self, condition: str) -> str:
        for i, name in enumerate(self.names):
            condition = condition.replace(f"L['flat_args'][{i}]", name)
        return re.sub(r"L\['(\w+)'\]", r"\1", condition).replace(".size()", ".shape")

    @property
    def _expected(self) -> str:
        expected = []
        if self.parameters:
            expected.append(f"the arguments {', '.join(self.parameters)} in this order")
        if self.kwargs:
            expected.append(f"the keywords {', '.join(self.kwargs)}")
        return " and ".join(expected)


def _numbers(program: ExportedProgram) -> list[int]:
    """Return the indices of the output leaves of a program that are numbers: constants or sizes."""
    outputs = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    numbers = []
    for i, output in enumerate(outputs):
        if not isinstance(output, TensorArgument) and getattr(output, "value", 0) is not None:
            numbers.append(i)
    return numbers


def _described(args: tuple, kwargs: dict) -> str:
    keywords = f" and the keywords {', '.join(kwargs)}" if kwargs else ""
    return f"{len(args)} positional arguments{keywords}"
