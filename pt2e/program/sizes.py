"""Sizes of the dimensions of an exported program's inputs: symbols, ranges, further conditions, dynamic shapes.

A size is a number, a symbol, or a function of symbols. Each symbol has a range. Conditions that ranges cannot say are
Python expressions of `L`, the arguments by their names; `L["flat_args"]` are their leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from pt2mx.errors import MXError

#: key of what torch saves of a graph's meta: JSON, symbol -> the name of its `Dim`
_DIMS = "pt2mx.dims"
#: smallest and largest size of a dimension; the latter is None where there is no bound
Range = tuple[int, int | None]


class InputDim(NamedTuple):
    """A dimension of an input: its size in the example, the index of the input, and the index of the dimension."""

    size: int
    input: int
    dim: int


def ranges(program: ExportedProgram, lower: Mapping[sympy.Symbol, int] | None = None) -> list[list[Range] | None]:
    """Return the range of each dimension of the program's inputs, in their order; None for an input that is no tensor.

    Lower bounds of symbols in `lower` replace the program's bounds.
    """
    of_inputs: list[list[Range] | None] = []
    for node in input_nodes(program):
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            of_inputs.append(None)
            continue
        of_dims = []
        for size in value.shape:
            expression = symbolic(size)
            of_dims.append((int(size), int(size)) if expression is None else range_of(program, expression, lower))
        of_inputs.append(of_dims)
    return of_inputs


def symbols(program: ExportedProgram) -> dict[sympy.Symbol, InputDim]:
    """Return the symbols that are the size of an input's dimension, each with the last such dimension."""
    leaves, dims = pytree.tree_leaves(program.example_inputs), {}
    for i, j, expression in dynamic_sizes(program):
        if expression.is_Symbol:
            dims[expression] = InputDim(leaves[i].shape[j], i, j)
    return dims


def every_symbol(program: ExportedProgram) -> list[sympy.Symbol]:
    """Return the symbols of the inputs' sizes, also those of which only a function is a size, in a fixed order."""
    free: set[sympy.Symbol] = set()
    for *_, expression in dynamic_sizes(program):
        free |= expression.free_symbols
    return sorted(free, key=str)


def sizes_at(program: ExportedProgram, values: Mapping[sympy.Symbol, int]) -> list[list[int] | None]:
    """Return the sizes of the program's inputs for these values of its symbols, and the example's sizes where they
    depend on other symbols; None for an input that is no tensor."""
    leaves = pytree.tree_leaves(program.example_inputs)
    sizes: list[Any] = [list(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
    for i, j, expression in dynamic_sizes(program):
        size = expression.subs(values)
        if size.is_number:
            sizes[i][j] = int(size)
    return sizes


def input_nodes(program: ExportedProgram) -> list[Node]:
    """Return the placeholder of each user input of the program, including constants, in their order."""
    placeholders = program.graph.find_nodes(op="placeholder")
    specs = program.graph_signature.input_specs
    return [node for node, spec in zip(placeholders, specs, strict=True) if spec.kind is InputKind.USER_INPUT]


def dynamic_sizes(program: ExportedProgram) -> Iterator[tuple[int, int, sympy.Expr]]:
    """Yield the dynamic sizes of the inputs: the index of the input, the dimension, and an expression of symbols."""
    for i, node in enumerate(input_nodes(program)):
        value = node.meta["val"]
        for j, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            expression = symbolic(size)
            if expression is not None:
                yield i, j, expression


def dim_names(program: ExportedProgram) -> dict[str, str]:
    """Return the names that the dynamic shapes of an export, or of one before it was saved, give to symbols.

    Of a damaged record it returns the names that can be a `Dim`'s."""
    names = _given_names(program) or (program.graph_module.meta.get("custom") or {}).get(_DIMS)
    pairs = names.items() if isinstance(names, dict) else ()
    return {symbol: name for symbol, name in pairs if isinstance(name, str) and name.isidentifier()}  # not 2*batch


def _given_names(program: ExportedProgram) -> dict[str, str]:
    """Return the names in the shape environment of an export, which a loaded program lacks. A named dimension may equal
    one without a name, whose symbol then stands for both."""
    values = [node.meta["val"] for node in input_nodes(program)]
    sizes: list[Any] = [size for value in values if isinstance(value, Tensor) for size in value.shape]
    envs = {size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)}  # one, or none without symbols
    return {
        str(env.replace(env.source_to_var[source])): name
        for env in envs
        for source, name in env.source_name_to_debug_name.items()
        if source in env.source_to_var
    }


def record_dim_names(program: ExportedProgram) -> None:
    """Let `torch.export.save` write the names of symbols, which it loses otherwise."""
    if names := dim_names(program):
        program.graph_module.meta["custom"] = {**(program.graph_module.meta.get("custom") or {}), _DIMS: names}


def size_in_conditions(leaf: int, dim: int) -> str:
    """Return the expression of `L` for the size of a dimension of an input."""
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
    program: ExportedProgram, expression: sympy.Expr, lower: Mapping[sympy.Symbol, int] | None = None
) -> Range:
    """Return the range of an expression of symbols; lower bounds in `lower` replace the program's bounds."""
    bounds = program.range_constraints.get(expression)
    if bounds is None or not expression.free_symbols.isdisjoint(lower or ()):
        of_symbols = {}
        for symbol in expression.free_symbols:
            stated = program.range_constraints[symbol]
            least = (lower or {}).get(symbol, stated.lower)
            of_symbols[symbol] = ValueRanges(least, stated.upper)
        bounds = bound_sympy(expression, of_symbols)
    return int(bounds.lower), None if bounds.upper in (int_oo, sympy.oo) else int(bounds.upper)


def guards(program: ExportedProgram) -> list[str]:
    """Return the conditions that tracing assumed, such as an even length."""
    return list(getattr(program, "_guards_code", ()))


def relations(program: ExportedProgram) -> list[str]:
    """Return the equations of dimensions that are equal to others, or a function of them."""
    equations: list[str] = []
    known: dict[sympy.Symbol, sympy.Expr] = {}
    print_python = PythonPrinter().doprint
    # symbols first: they give the others their values
    for i, j, expression in sorted(dynamic_sizes(program), key=lambda found: not found[-1].is_Symbol):
        size = size_in_conditions(i, j)
        if expression.free_symbols <= known.keys():
            equations.append(f"{size} == {print_python(expression.subs(known))}")
        elif parts := linear(expression):
            symbol, factor, offset = parts
            known[symbol] = FloorDiv(sympy.Symbol(size, integer=True) - offset, factor)
            if factor != 1:
                equations.append(f"{size} == {print_python(factor * known[symbol] + offset)}")
    return equations


def guards_follow(program: ExportedProgram, module: GraphModule) -> bool:
    """Return whether the guards follow from the shapes of the inputs and the ranges of their symbols."""
    values = [node.meta["val"] for node in input_nodes(program)]
    args, kwargs = pytree.tree_unflatten(values, program.call_spec.in_spec)
    variables = condition_variables(values, parameter_names(module, len(args)), args, kwargs)
    functions = {**SYMPY_INTERP, "max": torch.sym_max, "min": torch.sym_min, "L": variables}

    def follows(guard: str) -> bool:
        holds = eval(guard, dict(functions))
        if isinstance(holds, torch.SymBool):  # the shape environment would assume the guard itself
            return bound_sympy(holds.node.expr, program.range_constraints).lower is sympy.true
        return holds

    try:
        return all(map(follows, guards(program)))
    except Exception:  # a guard that is not about shapes
        return False


def dynamic_shapes(program: ExportedProgram, module: GraphModule) -> tuple:
    """Return the dynamic shapes with which a graph module is exported again with the sizes of a program.

    They state ranges, equal dimensions, and dimensions that are a linear function of another. Where the program has
    other guards (an even length, a sum of two), dimensions are `Dim.AUTO`, and export infers them again. Stated
    dimensions keep their names. The module is the program's, or one with the same signature.
    """
    dims: dict[sympy.Symbol, Dim] = {}
    names = dim_names(program)
    stated = all(linear(size) for *_, size in dynamic_sizes(program)) and guards_follow(program, module)

    def dim(expression: sympy.Expr) -> object:
        parts = linear(expression) if stated else None
        if parts is None:
            low, high = range_of(program, expression)
            return Dim.AUTO(min=low, max=high)
        symbol, factor, offset = parts
        if symbol not in dims:
            low, high = range_of(program, symbol)
            dims[symbol] = Dim(names.get(str(symbol), str(symbol)), min=low, max=high)
        derived = dims[symbol] if factor == 1 else int(factor) * dims[symbol]
        return derived if offset == 0 else derived + int(offset)

    shapes: list[Any] = []
    for node in input_nodes(program):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise MXError(
                f"the input {node.name!r} is a dynamic number, which pt2mx cannot export again: export the program "
                "with a fixed one, or let it be the size of a tensor"
            )
        shapes.append({} if isinstance(value, Tensor) else None)
    for i, j, expression in dynamic_sizes(program):
        shapes[i][j] = dim(expression)
    args, kwargs = pytree.tree_unflatten(shapes, program.call_spec.in_spec)
    return (*args, *kwargs.values())


def parameter_names(module: GraphModule, count: int) -> list[str]:
    """Return the names of the first `count` parameters of an exported module."""
    return list(inspect.signature(module.forward).parameters)[:count]


def condition_variables(leaves: list, names: list[str], args: tuple, kwargs: dict) -> dict[str, object]:
    """Return `L` of the conditions: the arguments by their names, and their leaves.

    The arguments `*args` are `args_0` and so on in a call of a module; guards may write `args` with an index.
    """
    named: dict[str, object] = dict(zip(names, args, strict=True)) | kwargs
    indexed: dict[str, dict[int, object]] = {}
    for name, value in zip(names, args, strict=True):
        base, _, index = name.rpartition("_")
        if base and index.isdecimal():
            indexed.setdefault(base, {})[int(index)] = value
    return {**indexed, **named, "flat_args": leaves}
