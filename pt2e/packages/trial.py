"""Trials of compiled code: it is compared with the program on inputs of other extents than the example's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.pt2e.packages.extents import sizes_at, symbols
from pt2mx.pt2e.packages.signature import in_memory_order, memory_order
from pt2mx.pt2e.report.agreement import fidelity

#: dB: far above what code computes that reads other values, and below what products in another order make of a 4-bit
#: quantization behind them
_AGREEMENT = 20.0

Call = Callable[..., object]
#: extents of some symbols, the others having the example's -> True if compiled code gives what the program gives; None
#: if the program does not take such inputs
Trial = Callable[[Mapping[sympy.Symbol, int]], bool | None]


def trial(program: ExportedProgram, eager: Call, compiled: Call) -> Trial:
    """Return a function that runs trials of a program. The values of its example inputs are cut or repeated to the
    extents that are tried.

    Args:
        program: an exported program with example inputs.
        eager: the program's module. It raises an error where the program does not take its inputs.
        compiled: called with the same inputs.
    """
    example = {symbol: place.extent for symbol, place in symbols(program).items()}

    def agree(extents: Mapping[sympy.Symbol, int]) -> bool | None:
        return _agree(_resized(program, {**example, **extents}), eager, compiled)

    return agree


def _resized(program: ExportedProgram, extents: Mapping[sympy.Symbol, int]) -> tuple[tuple, dict] | None:
    """Return the example's inputs with the sizes at these extents; None where there are none."""
    leaves, tree = pytree.tree_flatten(program.example_inputs)
    resized = []
    for leaf, sizes in zip(leaves, sizes_at(program, extents), strict=True):
        if sizes is not None:
            if any(size < 0 or size > length == 0 for size, length in zip(sizes, leaf.shape, strict=True)):
                return None
            order = memory_order(leaf)
            for dim, size in enumerate(sizes):
                if size > leaf.shape[dim]:
                    leaf = torch.cat([leaf] * -(-size // leaf.shape[dim]), dim)
                leaf = leaf.narrow(dim, 0, size)
            leaf = in_memory_order(leaf, order).clone()
        resized.append(leaf)
    return pytree.tree_unflatten(resized, tree)


def _agree(inputs: tuple[tuple, dict] | None, eager: Call, compiled: Call) -> bool | None:
    """True if compiled code gives what the program gives; None if the program does not take the inputs."""
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
    return fidelity([(got, wanted)]).sqnr >= _AGREEMENT


def _alike(want: object, got: object) -> bool:
    """True if two outputs are equal; of floating tensors only the shapes and dtypes are compared."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return want == got
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    return want.is_floating_point() or torch.equal(want.cpu(), got.cpu())
