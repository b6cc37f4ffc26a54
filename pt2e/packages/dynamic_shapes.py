"""The dynamic shapes of an exported program, as `torch.export.export` takes them."""

from __future__ import annotations

import sympy
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.pt2e.packages.sizes import dynamic_sizes, guards_follow, input_nodes, linear, range_of, symbolic


def dynamic_shapes(program: ExportedProgram, module: GraphModule) -> tuple:
    """Return the dynamic shapes with which a graph module is exported again with the sizes of a program.

    They state ranges, equal dimensions, and dimensions that are a linear function of another. Where the program has
    other guards (an even length, a sum of two), dimensions are `Dim.AUTO`, and export infers them again.

    Args:
        program: an exported program.
        module: its graph module, or one with the same signature.

    Raises:
        MXError: for an input that is a dynamic number.
    """
    dims: dict[sympy.Symbol, Dim] = {}
    stated = all(linear(size) for _, size in dynamic_sizes(program)) and guards_follow(program, module)

    def dim(expression: sympy.Expr) -> object:
        parts = linear(expression) if stated else None
        if parts is None:
            low, high = range_of(program, expression)
            return Dim.AUTO(min=low, max=high)
        symbol, factor, offset = parts
        if symbol not in dims:
            low, high = range_of(program, symbol)
            dims[symbol] = Dim(f"d{len(dims)}", min=low, max=high)
        derived = dims[symbol] if factor == 1 else int(factor) * dims[symbol]
        return derived if offset == 0 else derived + int(offset)

    def shape_of(node: Node) -> dict[int, object] | None:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise MXError(
                f"the input {node.name!r} is a dynamic number, which AOTInductor does not take: export the program "
                "with a fixed one, or let it be the size of a tensor"
            )
        if not isinstance(value, Tensor):
            return None
        sizes = enumerate(value.shape)
        return {i: dim(expression) for i, size in sizes if (expression := symbolic(size)) is not None}

    shapes = [shape_of(node) for node in input_nodes(program)]
    args, kwargs = pytree.tree_unflatten(shapes, program.call_spec.in_spec)
    return (*args, *kwargs.values())
