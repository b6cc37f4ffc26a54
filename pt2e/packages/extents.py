"""The sizes of an exported program's inputs: extents, which may be symbols or functions of such, and their ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

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


class Place(NamedTuple):
    """The place of a symbol that is an extent of an input: its extent in the example, the input's index, and the
    dimension."""

    extent: int
    input: int
    dim: int


def ranges(program: ExportedProgram, least: Mapping[sympy.Symbol, int] | None = None) -> list[list[Range] | None]:
    """Return the range of each dimension of the program's inputs, in their order; None for an input that is no tensor.

    Args:
        program: an exported program.
        least: lower bounds of symbols that replace those of the program.
    """

    def of_size(size: int | torch.SymInt) -> Range:
        expression = symbolic(size)
        return (int(size), int(size)) if expression is None else range_of(program, expression, least)

    values = [node.meta["val"] for node in input_nodes(program)]
    return [[of_size(size) for size in value.shape] if isinstance(value, Tensor) else None for value in values]


def symbols(program: ExportedProgram) -> dict[sympy.Symbol, Place]:
    """Return the symbols that are extents of inputs by themselves, each with its last place."""
    return {
        expression: Place(extent, i, j)
        for i, (leaf, node) in enumerate(_inputs(program))
        if isinstance(leaf, Tensor)
        for j, (extent, size) in enumerate(zip(leaf.shape, node.meta["val"].shape, strict=True))
        if (expression := symbolic(size)) is not None and expression.is_Symbol
    }


def sizes_at(program: ExportedProgram, extents: Mapping[sympy.Symbol, int]) -> list[list[int] | None]:
    """Return the sizes of the program's inputs where its symbols have these extents, and the example's where they
    depend on others; None for an input that is no tensor."""

    def of_size(length: int, size: int | torch.SymInt) -> int:
        expression = symbolic(size)
        found = sympy.Integer(size) if expression is None else expression.subs(extents)
        return int(found) if found.is_number else length

    return [
        [of_size(*pair) for pair in zip(leaf.shape, node.meta["val"].shape, strict=True)]
        if isinstance(leaf, Tensor)
        else None
        for leaf, node in _inputs(program)
    ]


def input_nodes(program: ExportedProgram) -> list[Node]:
    """Return the placeholder of each of the program's own inputs, constants among them, in their order."""
    placeholders = program.graph.find_nodes(op="placeholder")
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    return [node for node, kind in zip(placeholders, kinds, strict=True) if kind is InputKind.USER_INPUT]


def dynamic_sizes(program: ExportedProgram) -> Iterator[tuple[str, sympy.Expr]]:
    """Yield the dynamic sizes of the inputs, each as an expression of `L` and as one of symbols."""
    for i, node in enumerate(input_nodes(program)):
        for j, size in enumerate(node.meta["val"].shape if isinstance(node.meta["val"], Tensor) else ()):
            if (expression := symbolic(size)) is not None:
                yield size_in_conditions(i, j), expression


def size_in_conditions(leaf: int, dim: int) -> str:
    """Return the size of an input in the form of `pt2mx.pt2e.packages.conditions`."""
    return f"L['flat_args'][{leaf}].size()[{dim}]"


def linear(expression: sympy.Expr) -> tuple[sympy.Symbol, sympy.Integer, sympy.Integer] | None:
    """Return (symbol, factor, offset) of a linear function of one symbol; None for another expression."""
    if len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    factor, offset = expression.coeff(symbol), expression.subs(symbol, 0)
    return (symbol, factor, offset) if sympy.expand(factor * symbol + offset - expression) == 0 else None


def symbolic(size: int | torch.SymInt) -> sympy.Expr | None:
    """Return the expression of a size that depends on symbols; None for a number."""
    return size.node.expr if isinstance(size, torch.SymInt) and not size.node.expr.is_number else None


def range_of(
    program: ExportedProgram, expression: sympy.Expr, least: Mapping[sympy.Symbol, int] | None = None
) -> Range:
    """Return the range of an expression of symbols; lower bounds in `least` replace those of the program."""
    found = program.range_constraints.get(expression)
    least = {symbol: n for symbol, n in (least or {}).items() if symbol in expression.free_symbols}
    if found is None or least:
        of_symbols = {symbol: program.range_constraints[symbol] for symbol in expression.free_symbols}
        of_symbols |= {symbol: ValueRanges(n, of_symbols[symbol].upper) for symbol, n in least.items()}
        found = bound_sympy(expression, of_symbols)
    return int(found.lower), None if found.upper in (int_oo, sympy.oo) else int(found.upper)


def _inputs(program: ExportedProgram) -> list[tuple[object, Node]]:
    """Return the leaves of the example with their placeholders."""
    return list(zip(pytree.tree_leaves(program.example_inputs), input_nodes(program), strict=True))
