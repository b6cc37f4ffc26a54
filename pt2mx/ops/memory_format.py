"""The order of a tensor's dimensions in memory, which the operators keep.

What an operator gives is dense, and its dimensions lie in memory in the order of those of its input: as torch's
pointwise operators have it (`torch.preserve_format`), but that the axis along which codes are packed may change its
length. So a dense input gives its own strides, and a view that was valid before a quantization is valid after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm as order_of_pointwise_result

from pt2mx.modes import ROUNDINGS
from pt2mx.spec import MXSpec

#: dimensions from the outermost in memory to the innermost
Order = tuple[int, ...]


def order_in_memory(x: Tensor) -> Order:
    """Return the order that a pointwise operator gives its result for x; its dense strides are x's, where x is dense.

    Dimensions of length 1 count too: their strides say which of several orders is meant (a batch of one image with its
    channels last), and packed codes may have length 1 where the values have 2.
    """
    if {*map(type, (*x.shape, *x.stride()))} <= {int}:
        order = _order_of_dense(x.shape, x.stride())
    else:
        order = _order(x.shape, x.stride())
    return order or tuple(order_of_pointwise_result(x)[0])


def with_memory_format_of(
    x: Tensor, kernel: Callable[..., Tensor | tuple[Tensor, ...]], spec: MXSpec, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return what `kernel(spec, *tensors)` gives, in x's order in memory, as tensors of their own.

    The kernel gives contiguous tensors; `tensors` have x's dimensions. It gets them permuted to x's order in memory,
    unless it draws random numbers, which go by the position of a value in x, whatever the strides, or its blocks have
    several rows, whose dimension goes by its position in x (`MXSpec.row_axis`).
    """
    if has_one_order(x):
        return as_tuple(kernel(spec, *tensors))
    order = order_in_memory(x)
    if order == contiguous_order(x):
        results = as_tuple(kernel(spec, *tensors))
        if x.shape[spec.axis] > 2 and spec.block_rows == 1:
            return results
    elif ROUNDINGS[spec.rounding].random or spec.block_rows > 1:
        results = tuple(y.permute(order).contiguous() for y in as_tuple(kernel(spec, *tensors)))
    else:
        spec = spec.replace(axis=order.index(spec.axis))
        results = as_tuple(kernel(spec, *(t.permute(order) for t in tensors)))
    shapes = [inverse_permute(y, order).shape for y in results]
    return tuple(y.as_strided_(n, strides_in_order(x, n)) for y, n in zip(results, shapes, strict=True))


def has_one_order(x: Tensor) -> bool:
    """Return whether x is contiguous and no stride is ambiguous, as usual: its results are contiguous too."""
    return x.is_contiguous() and min(x.shape) > 1


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the results of a kernel, of which there may be one."""
    return results if isinstance(results, tuple) else (results,)


def strides_in_order(x: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the dense strides of a result for x, whose shape may differ from x's along one dimension.

    A byte may hold both values of a dimension. Its own stride then does not tell where it lies among dimensions of
    length 1, so those have the same strides in codes and values.
    """
    order = order_in_memory(x)
    strides = dense_strides(shape, order)
    for n, m in zip(x.shape, shape, strict=True):
        if isinstance(n, int) and isinstance(m, int) and {n, m} == {1, 2}:
            of_values = dense_strides(x.shape, order) if n == 2 else x.stride()
            both_one = [_known(x.shape[d] == 1) and _known(size == 1) for d, size in enumerate(shape)]
            strides = [of_values[d] if both_one[d] else stride for d, stride in enumerate(strides)]
    return strides


def empty_in_format_of(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty result of that shape, in x's order in memory."""
    return x.new_empty_strided(shape, strides_in_order(x, shape), dtype=dtype)


def contiguous_order(x: Tensor) -> Order:
    """Return the order of a contiguous tensor with x's dimensions."""
    return tuple(range(x.dim()))


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the strides without gaps of a tensor whose dimensions lie in that order."""
    strides, step = [1] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step = step * (shape[d] if _known(shape[d] > 0) else torch.sym_max(shape[d], 1))
    return strides


def is_dense(x: Tensor, order: Order) -> bool:
    """True if x is known to be dense, with its dimensions in that order; of symbolic sizes that sets no guard."""
    return _are(x.shape, x.stride(), dense_strides(x.shape, order))


def inverse_permute(x: Tensor, order: Order) -> Tensor:
    """Return the inverse of `x.permute(order)`."""
    return x.permute([order.index(d) for d in range(len(order))])


def _order(shape: Sequence[int], strides: Sequence[int]) -> Order | None:
    """Return the order of a dense tensor; None for gaps, overlaps, and symbols that do not tell."""

    def compare(a: int, b: int) -> int:
        if _known(strides[a] == strides[b]):  # one of them has no second value: it lies inside the other
            return _known(shape[a] <= 1) - _known(shape[b] <= 1)
        return -1 if _is_outside(strides[a], strides[b]) else 1

    order = tuple(sorted(range(len(shape)), key=functools.cmp_to_key(compare)))
    return order if _are(shape, strides, dense_strides(shape, order)) else None


_order_of_dense = functools.lru_cache(maxsize=4096)(_order)


def _are(shape: Sequence[int], strides: Sequence[int], dense: Sequence[int]) -> bool:
    return all(_known(n <= 1) or _known(a == b) for n, a, b in zip(shape, strides, dense, strict=True))


def _is_outside(stride: int, other: int) -> bool:
    """True if the larger of two strides is the first. Of dense symbolic ones it is a multiple of the other; to compare
    multiples of sizes would set a guard."""
    if isinstance(stride, int) and isinstance(other, int):
        return stride > other
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if _divides(other, stride):
        return True
    return not _divides(stride, other) and guard_or_false(stride > other)


def _divides(divisor: int, n: int) -> bool:
    return not _known(divisor == 0) and _known(n % divisor == 0)


def _known(statement: bool | torch.SymBool) -> bool:
    """True if the statement is true for every value of the symbols in it."""
    if isinstance(statement, bool):
        return statement
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports much that eager calls do without

    return statically_known_true(statement)
