"""Probe compiled code with other sizes than the example's: find the smallest ones, and dimensions that are equal.

Tracing assumes that a dynamic size is at least 2, and exported programs do not check it: most also take 0 and 1.
Compiled code may rely on the assumption (`x[:2]` reads two rows). A program also rejects a mask shorter than its ids;
compiled code reads past its end instead. No guard of the export says so. Both are therefore run on the same inputs, and
their outputs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import sympy
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pt2mx.analysis.agreement import fidelity
from pt2mx.errors import MXError
from pt2mx.pt2e.packages.pytree_args import in_memory_order, memory_order
from pt2mx.pt2e.program.sizes import Range, every_symbol, range_of, size_in_conditions, sizes_at, symbols

#: lengths at which machine code has been seen to lose a row, and others around powers of two and small primes
_LENGTHS = (1, 2, 3, 5, 7, 48, 49, 50)
#: values of the inputs up to which a length is probed, or four times the example's: a probe runs the whole model twice
_MOST_VALUES = 2**16
#: dB: far above code that reads wrong values, and below sums in another order in front of a 4-bit quantization
_MIN_SQNR = 20.0

Call = Callable[..., object]
#: sizes of some symbols, the others as in the example -> whether compiled code gives the eager program's outputs; None
#: if the program rejects such inputs
Probe = Callable[[Mapping[sympy.Symbol, int]], bool | None]
#: two symbols; the size of the first must be at least the size of the second
DimConstraint = tuple[sympy.Symbol, sympy.Symbol]


def min_sizes(
    program: ExportedProgram, stated: Sequence[list[Range] | None], eager: Call, compiled: Call
) -> tuple[dict[sympy.Symbol, int], list[str]]:
    """Find the smallest dimension sizes that a compiled package accepts, and the dimensions whose sizes must agree.

    Args:
        program: an exported program with example inputs, from which the inputs of the probes are made.
        stated: the ranges of its inputs.
        eager, compiled: as `probe` takes them.

    Returns:
        symbol -> size, and the conditions on sizes, as `pt2mx.pt2e.program.sizes` writes them. The size is 0 or 1 if
        the stated range allows it and both give the same outputs, otherwise 2. A stated range from 2 allows 1, because
        every range of a traced dimension starts at 2.

    Raises:
        MXError: where the package gives other outputs at a length that it would accept.
    """
    dims = symbols(program)
    example = {symbol: dim.size for symbol, dim in dims.items()}
    matches = probe(program, eager, compiled)
    constraints = equal_dims(example, {symbol: dim.dim for symbol, dim in dims.items()}, matches)

    smallest: dict[sympy.Symbol, int] = {}
    for symbol, dim in dims.items():
        ranges = stated[dim.input]
        # code that was compiled for a size of 1 in the example takes no other
        if ranges is None or ranges[dim.dim][0] > 2 or dim.size < 2:
            continue
        smallest[symbol] = 2
        group = [symbol, *(smaller for larger, smaller in constraints if larger == symbol)]  # these shrink with it
        if matches(dict.fromkeys(group, 1)):
            takes_none = ranges[dim.dim][0] == 0 and matches(dict.fromkeys(group, 0))
            smallest[symbol] = 0 if takes_none else 1
    # all together; None is fine, since the package rejects what the program rejects
    if matches(smallest) is False:
        smallest = dict.fromkeys(smallest, 2)
    _check_lengths(program, smallest, matches)
    sizes = {symbol: size_in_conditions(dim.input, dim.dim) for symbol, dim in dims.items()}
    return smallest, _conditions(constraints, sizes)


def _check_lengths(program: ExportedProgram, smallest: Mapping[sympy.Symbol, int], matches: Probe) -> None:
    """Raise an MXError where compiled code gives other outputs at one of `_LENGTHS`, or at an end of a range.

    All symbols have that length, as far as their ranges allow it; each alone where the program rejects that. Symbols
    count whose multiples alone are sizes (49 times a length).
    """
    bounds = {symbol: range_of(program, symbol, smallest) for symbol in every_symbol(program)}
    lengths = set(_LENGTHS)
    for ends in bounds.values():
        lengths.update(end for end in ends if end is not None)
    probes = {tuple(_within(length, *ends) for ends in bounds.values()) for length in lengths}
    most = max(_MOST_VALUES, 4 * _values(program, {}))
    for probed in sorted(probes):
        together = dict(zip(bounds, probed, strict=True))
        for sizes in (together, *({symbol: size} for symbol, size in together.items())):
            fits = matches(sizes) if _values(program, sizes) <= most else None
            if fits is False:
                raise MXError(
                    f"the machine code of torch {torch.__version__} gives other outputs than the program for inputs of "
                    f"the sizes {sizes_at(program, sizes)}: use torch.compile, or export the program with fixed sizes"
                )
            if fits:
                break


def _within(length: int, low: int, high: int | None) -> int:
    return max(low, length if high is None else min(length, high))


def _values(program: ExportedProgram, sizes: Mapping[sympy.Symbol, int]) -> int:
    return sum(math.prod(shape) for shape in sizes_at(program, sizes) if shape is not None)


def _conditions(constraints: list[DimConstraint], sizes: dict[sympy.Symbol, str]) -> list[str]:
    order = list(sizes)
    conditions = []
    for larger, smaller in constraints:
        if (smaller, larger) not in constraints:
            conditions.append(f"{sizes[larger]} >= {sizes[smaller]}")
        elif order.index(larger) < order.index(smaller):
            conditions.append(f"{sizes[larger]} == {sizes[smaller]}")
    return conditions


def equal_dims(
    example: Mapping[sympy.Symbol, int], dims: Mapping[sympy.Symbol, int], matches: Probe
) -> list[DimConstraint]:
    """Find the dimensions whose sizes depend on each other: the program takes one only if others change with it.

    Only symbols that have the same size in the example can depend on each other; equal sizes have a constraint in each
    direction. `dims` has the index of the dimension whose size a symbol is.
    """
    constraints: list[DimConstraint] = []
    for size in sorted(set(example.values())):
        alike = [symbol for symbol in example if example[symbol] == size]
        if len(alike) == 1:
            continue
        # larger sizes first: repeated values are valid, whereas an index may point at what was cut off. Twice and half
        # the size are for programs that take even sizes only
        candidates = (size + 1, 2 * size, size - 1, size // 2)
        changed = next((n for n in candidates if n and matches(dict.fromkeys(alike, n))), None)
        if changed is None:
            continue
        for symbol in alike:
            for other in _change_together(symbol, alike, dims, changed, matches):
                if other != symbol:
                    constraints.append((other, symbol) if changed > size else (symbol, other))
    return constraints


def _change_together(
    symbol: sympy.Symbol, alike: list[sympy.Symbol], dims: Mapping[sympy.Symbol, int], size: int, matches: Probe
) -> list[sympy.Symbol]:
    """Find a small set of symbols, `symbol` among them, that the program takes at `size`. It takes all of `alike`."""

    def is_taken(group: list[sympy.Symbol]) -> bool:
        return matches(dict.fromkeys(group, size)) is True

    pairs = [[symbol, other] for other in alike if other != symbol]
    same_dim = [other for other in alike if dims[other] == dims[symbol]]
    group = next(filter(is_taken, [[symbol], *pairs, same_dim]), alike)
    for other in group if len(group) > 2 else ():
        without = [kept for kept in group if kept != other]
        if other != symbol and is_taken(without):
            group = without
    return group


def probe(program: ExportedProgram, eager: Call, compiled: Call) -> Probe:
    """Return the probe of a program. It cuts or repeats the values of the example inputs to the sizes that it tries.

    Args:
        program: an exported program with example inputs.
        eager: the program's module. It raises an error for inputs that the program rejects.
        compiled: called with the same inputs.
    """
    example = {symbol: dim.size for symbol, dim in symbols(program).items()}

    def matches(sizes: Mapping[sympy.Symbol, int]) -> bool | None:
        inputs = _resized(program, {**example, **sizes})
        return None if inputs is None else _matches_eager(inputs, eager, compiled)

    return matches


def _resized(program: ExportedProgram, values: Mapping[sympy.Symbol, int]) -> tuple[tuple, dict] | None:
    """Return the example's inputs at these sizes; None where no tensor has them."""
    leaves, tree = pytree.tree_flatten(program.example_inputs)
    resized = []
    for leaf, sizes in zip(leaves, sizes_at(program, values), strict=True):
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


def _matches_eager(inputs: tuple[tuple, dict], eager: Call, compiled: Call) -> bool | None:
    """Return whether compiled code gives the eager program's outputs; None if the program rejects the inputs."""
    args, kwargs = inputs
    try:
        eager_args, eager_kwargs = pytree.tree_map_only(Tensor, Tensor.clone, inputs)  # the program may write to them
        want = eager(*eager_args, **eager_kwargs)
    except Exception:  # a program may reject inputs by any error
        return None
    try:
        got = compiled(*args, **kwargs)
    except Exception:
        return False
    want, got = pytree.tree_leaves(want), pytree.tree_leaves(got)
    if len(want) != len(got) or not all(map(_alike, want, got)):
        return False
    return fidelity([(got, want)]).sqnr >= _MIN_SQNR


def _alike(want: object, got: object) -> bool:
    """Return whether two outputs are equal; for floating tensors, only whether their shapes and dtypes are."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return want == got
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    return want.is_floating_point() or torch.equal(want.cpu(), got.cpu())
