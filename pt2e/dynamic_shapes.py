"""The dynamic shapes of an exported program, in the form in which `torch.export.export` takes them."""

from __future__ import annotations

import sympy
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy

#: a dimension's least and largest extent, the latter None where there is no bound
Range = tuple[int, int | None]


def dynamic_shapes(program: ExportedProgram) -> tuple:
    """What a graph module with the program's signature is exported with to have its dynamic shapes: ranges, dimensions
    that are equal, and those that are a linear function of another."""
    dims: dict[sympy.Symbol, Dim] = {}

    def dim(expression: sympy.Expr) -> object:
        (symbol,) = expression.free_symbols
        if symbol not in dims:
            least, most = _range(program, symbol)
            dims[symbol] = Dim(f"d{len(dims)}", min=least, max=most)
        factor, offset = expression.coeff(symbol), expression.subs(symbol, 0)
        derived = dims[symbol] if factor == 1 else int(factor) * dims[symbol]
        return derived if offset == 0 else derived + int(offset)

    def of_leaf(value: object) -> dict[int, object] | None:
        if not isinstance(value, Tensor):
            return None
        return {i: dim(size.node.expr) for i, size in enumerate(value.shape) if _is_symbolic(size)}

    leaves = [of_leaf(node.meta["val"]) for node in input_nodes(program)]
    args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return (*args, *kwargs.values())


def ranges(program: ExportedProgram) -> list[list[Range]]:
    """The range of each dimension of each tensor among the program's inputs, in their order."""

    def of_size(size: int | torch.SymInt) -> Range:
        return _range(program, size.node.expr) if _is_symbolic(size) else (size, size)

    values = [node.meta["val"] for node in input_nodes(program)]
    return [[of_size(size) for size in value.shape] for value in values if isinstance(value, Tensor)]


def input_nodes(program: ExportedProgram) -> list[Node]:
    """The placeholder of each of the program's own inputs, constants among them, in their order."""
    placeholders = program.graph.find_nodes(op="placeholder")
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    return [node for node, kind in zip(placeholders, kinds, strict=True) if kind is InputKind.USER_INPUT]


def _is_symbolic(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _range(program: ExportedProgram, expression: sympy.Expr) -> Range:
    found = program.range_constraints.get(expression)
    if found is None:
        symbols = {symbol: program.range_constraints[symbol] for symbol in expression.free_symbols}
        found = bound_sympy(expression, symbols)
    return int(found.lower), None if found.upper in (int_oo, sympy.oo) else int(found.upper)
