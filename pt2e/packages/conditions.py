"""The conditions that an exported program sets on its inputs beside ranges.

They are Python expressions of `L`, the arguments by their names; `L["flat_args"]` are their leaves.
"""

from __future__ import annotations

import inspect

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import bound_sympy

from pt2mx.pt2e.packages.extents import dynamic_sizes, input_nodes, linear


def guards(program: ExportedProgram) -> list[str]:
    """Return what tracing assumed of the inputs: an even length, say."""
    return list(getattr(program, "_guards_code", ()))


def relations(program: ExportedProgram) -> list[str]:
    """Return the equations of dimensions that are equal to others, or a function of them."""
    found: list[str] = []
    known: dict[sympy.Symbol, sympy.Expr] = {}
    print_python = PythonPrinter().doprint
    for size, expression in sorted(dynamic_sizes(program), key=lambda pair: not pair[1].is_Symbol):  # those first
        if expression.free_symbols <= known.keys():
            found.append(f"{size} == {print_python(expression.subs(known))}")
        elif parts := linear(expression):
            symbol, factor, offset = parts
            known[symbol] = FloorDiv(sympy.Symbol(size, integer=True) - offset, factor)
            if factor != 1:
                found.append(f"{size} == {print_python(factor * known[symbol] + offset)}")
    return found


def guards_follow(program: ExportedProgram, module: GraphModule) -> bool:
    """True if the guards follow from the shapes of the inputs and the ranges of their symbols."""
    values = [node.meta["val"] for node in input_nodes(program)]
    args, kwargs = pytree.tree_unflatten(values, program.call_spec.in_spec)
    known = by_name(values, parameters(module, len(args)), args, kwargs)
    functions = {**SYMPY_INTERP, "max": torch.sym_max, "min": torch.sym_min, "L": known}

    def follows(guard: str) -> bool:
        holds = eval(guard, dict(functions))
        if isinstance(holds, torch.SymBool):  # not by the shape environment, which holds the guard itself to be true
            return bound_sympy(holds.node.expr, program.range_constraints).lower is sympy.true
        return holds

    try:
        return all(map(follows, guards(program)))
    except Exception:  # a guard of something else than shapes
        return False


def parameters(module: GraphModule, count: int) -> list[str]:
    """Return the names of the first `count` parameters of an exported module."""
    return list(inspect.signature(module.forward).parameters)[:count]


def by_name(leaves: list, names: list[str], args: tuple, kwargs: dict) -> dict[str, object]:
    """Return `L` of the conditions: the arguments by their names, and their leaves. `*args` are `args_0` and so on in a
    call of a module, and may be `args` with an index in guards."""
    found: dict[str, object] = dict(zip(names, args, strict=True)) | kwargs
    several: dict[str, dict[int, object]] = {}
    for name, value in zip(names, args, strict=True):
        base, _, index = name.rpartition("_")
        if base and index.isdecimal():
            several.setdefault(base, {})[int(index)] = value
    return {**several, **found, "flat_args": leaves}
