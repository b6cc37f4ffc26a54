"""The least extents that compiled code takes.

Tracing holds a dynamic extent to be at least 2, and exported programs do not check that bound: most take 0 and 1 as
well. Compiled code may have used it (`x[:2]` reads two rows). So it is tried what both compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.pt2e.agreement import agreement
from pt2mx.pt2e.extents import Range, sizes_at, symbols

#: dB: far above what code computes that reads other values, and below what products in another order make of a 4-bit
#: quantization behind them
_AGREEMENT = 20.0

Call = Callable[..., object]


def least_extents(
    program: ExportedProgram, stated: list[list[Range] | None], eager: Call, compiled: Call
) -> tuple[dict[sympy.Symbol, int], list[str]]:
    """The least extent of each of the program's symbols with which `compiled` gives what `eager` gives: of 0 and 1 as
    far as the stated range allows, and 1 also where that begins at 2, as tracing has it; else 2. Where the program
    takes an extent of 1 only if others are 1 too (a batch of ids and of their mask), a condition says so, in the form
    of `pt2mx.pt2e.conditions`.

    Args:
        program: with example inputs, of which parts are what is tried.
        stated: the ranges of its inputs.
        eager: the program's module. It raises an error where the program does not take its inputs.
        compiled: called with the same inputs.
    """
    found = symbols(program)
    example = {symbol: extent for symbol, (extent, _) in found.items()}
    lowest = {symbol: stated[leaf][dim][0] for symbol, (_, (leaf, dim)) in found.items()}
    sizes = {symbol: f"L['flat_args'][{leaf}].size()[{dim}]" for symbol, (_, (leaf, dim)) in found.items()}

    def agree(extents: Mapping[sympy.Symbol, int]) -> bool | None:
        return _agree(_part(program, {**example, **extents}), eager, compiled)

    # an extent of 1 in the example is what the code was made for
    least = {symbol: 2 for symbol, n in lowest.items() if n <= 2 and example[symbol] >= 2}
    conditions = []
    for symbol in least:
        agrees = agree({symbol: 1})
        if agrees:
            least[symbol] = 0 if lowest[symbol] == 0 and agree({symbol: 0}) else 1
        alike = [other for other, extent in example.items() if extent == example[symbol]]
        if agrees is None and agree(dict.fromkeys(alike, 1)):
            least[symbol] = 1
            conditions.append(f"{sizes[symbol]} != 1 or {' == '.join(sizes[other] for other in alike)}")
    # all of them at a time; a program that refuses that will do so
    if agree(least) is False:
        return dict.fromkeys(least, 2), []
    return least, conditions


def _part(program: ExportedProgram, extents: Mapping[sympy.Symbol, int]) -> tuple[tuple, dict] | None:
    """The example's inputs, cut to the sizes at these extents; None where they are shorter."""
    leaves, tree = pytree.tree_flatten(program.example_inputs)
    parts = []
    for leaf, sizes in zip(leaves, sizes_at(program, extents), strict=True):
        if sizes is not None:
            if any(not 0 <= size <= length for size, length in zip(sizes, leaf.shape, strict=True)):
                return None
            leaf = leaf[tuple(slice(size) for size in sizes)].clone()
        parts.append(leaf)
    return pytree.tree_unflatten(parts, tree)


def _agree(inputs: tuple[tuple, dict] | None, eager: Call, compiled: Call) -> bool | None:
    """Whether compiled code gives what the program gives; None where that does not take the inputs."""
    if inputs is None:
        return None
    args, kwargs = inputs
    try:
        own_args, own_kwargs = pytree.tree_map_only(Tensor, Tensor.clone, inputs)  # it may write to them
        want = eager(*own_args, **own_kwargs)
    except Exception:  # in whatever way the program refuses them
        return None
    try:
        got = compiled(*args, **kwargs)
    except Exception:
        return False
    wanted, got = pytree.tree_leaves(want), pytree.tree_leaves(got)
    if len(wanted) != len(got) or not all(map(_alike, wanted, got)):
        return False
    return agreement([(got, wanted)])[0] >= _AGREEMENT


def _alike(want: object, got: object) -> bool:
    """Whether two outputs are equal, of floating tensors their shapes and dtypes."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return want == got
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    return want.is_floating_point() or torch.equal(want.cpu(), got.cpu())
