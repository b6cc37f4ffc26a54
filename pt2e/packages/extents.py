"""The sizes of an exported program's inputs: extents, which may be symbols or functions of such, and their ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

#: a dimension's least and largest extent, the latter None where there is no bound
Range = tuple[int, int | None]


def ranges(program: ExportedProgram, least: Mapping[sympy.Symbol, int] | None = None) -> list[list[Range] | None]:
    """The range of each dimension of the program's inputs, in their order; None of an input that is no tensor.

    Args:
        least: other lower bounds of symbols than the program states.
    """

    def of_size(size: int | torch.SymInt) -> Range:
        return range_of(program, size.node.expr, least) if is_symbolic(size) else (int(size), int(size))

    values = [node.meta["val"] for node in input_nodes(program)]
    return [[of_size(size) for size in value.shape] if isinstance(value, Tensor) else None for value in values]


def symbols(program: ExportedProgram) -> dict[sympy.Symbol, tuple[int, tuple[int, int]]]:
    """The symbols that are extents of inputs by themselves: that of the example, and the input and dimension."""
    return {
        size.node.expr: (extent, (i, j))
        for i, (leaf, node) in enumerate(_inputs(program))
        if isinstance(leaf, Tensor)
        for j, (extent, size) in enumerate(zip(leaf.shape, node.meta["val"].shape, strict=True))
        if is_symbolic(size) and size.node.expr.is_Symbol
    }


def sizes_at(program: ExportedProgram, extents: Mapping[sympy.Symbol, int]) -> list[list[int] | None]:
    """The sizes of the program's inputs where its symbols have these extents, and the example's where they depend on
    others; None of an input that is no tensor."""

    def of_size(length: int, size: int | torch.SymInt) -> int:
        found = size.node.expr.subs(extents) if is_symbolic(size) else sympy.Integer(size)
        return int(found) if found.is_number else length

    return [
        [of_size(*pair) for pair in zip(leaf.shape, node.meta["val"].shape, strict=True)]
        if isinstance(leaf, Tensor)
        else None
        for leaf, node in _inputs(program)
    ]


def input_nodes(program: ExportedProgram) -> list[Node]:
    """The placeholder of each of the program's own inputs, constants among them, in their order."""
    placeholders = program.graph.find_nodes(op="placeholder")
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    return [node for node, kind in zip(placeholders, kinds, strict=True) if kind is InputKind.USER_INPUT]


def dynamic_sizes(program: ExportedProgram) -> Iterator[tuple[str, sympy.Expr]]:
    """The dynamic sizes of the inputs, as expressions of `L` and of symbols."""
    for i, node in enumerate(input_nodes(program)):
        for j, size in enumerate(node.meta["val"].shape if isinstance(node.meta["val"], Tensor) else ()):
            if is_symbolic(size):
                yield f"L['flat_args'][{i}].size()[{j}]", size.node.expr


def linear(expression: sympy.Expr) -> tuple[sympy.Symbol, sympy.Integer, sympy.Integer] | None:
    """(symbol, factor, offset) of a linear function of one symbol; None of another expression."""
    if len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    factor, offset = expression.coeff(symbol), expression.subs(symbol, 0)
    return (symbol, factor, offset) if sympy.expand(factor * symbol + offset - expression) == 0 else None


def is_symbolic(size: int | torch.SymInt) -> bool:
    """Whether a size is no number."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def range_of(
    program: ExportedProgram, expression: sympy.Expr, least: Mapping[sympy.Symbol, int] | None = None
) -> Range:
    """The range of an expression of symbols; `least` has other lower bounds of some than the program states."""
    found = program.range_constraints.get(expression)
    least = {symbol: n for symbol, n in (least or {}).items() if symbol in expression.free_symbols}
    if found is None or least:
        of_symbols = {symbol: program.range_constraints[symbol] for symbol in expression.free_symbols}
        of_symbols |= {symbol: ValueRanges(n, of_symbols[symbol].upper) for symbol, n in least.items()}
        found = bound_sympy(expression, of_symbols)
    return int(found.lower), None if found.upper in (int_oo, sympy.oo) else int(found.upper)


def _inputs(program: ExportedProgram) -> list[tuple[object, Node]]:
    """The leaves of the example with their placeholders."""
    return list(zip(pytree.tree_leaves(program.example_inputs), input_nodes(program), strict=True))
