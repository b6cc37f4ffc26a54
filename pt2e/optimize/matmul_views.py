"""View the operands of a matmul as matrices: the weight as (groups, N, K), the input as the rows multiplied with it.

A matmul is `rows @ matrix.T` for each group. Groups are independent: the groups of a convolution, the matrices of a
batched matmul, the experts of a mixture. MX blocks run along the columns and restart with each line: a convolution has
one line of channels for each tap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from pt2mx.fx.graph.convolution import CONVOLUTIONS, Convolution
from pt2mx.fx.graph.node import args_of, called, dtype_of, named_args, shape_of, value_of
from pt2mx.pt2e.optimize.observers import ROWS, Rows, sample
from pt2mx.pt2e.quantizer.operators import (
    OPERANDS,
    Operand,
    argument_of,
    arguments_of,
    einsum_axes,
    gather_of,
    operand_node,
    operands_of,
    operator_name,
    reduced_axis,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class MatmulView:
    """A weight as matrices, and the input rows multiplied with them.

    Args:
        axis: the dimension of the weight along which its blocks run.
        to_matrices: weight -> (groups, N, K).
        from_matrices: (groups, N, K), the weight's shape -> weight.
        rows: input, and the matmul's extra inputs -> (groups, rows, K), or (1, rows, K) for each group.
        columns_last: True if the columns are the last dimension of the input.
        experts: True if the groups are experts, which share the rows.
    """

    axis: int
    to_matrices: Callable[[Tensor], Tensor]
    from_matrices: Callable[[Tensor, torch.Size], Tensor]
    rows: Callable[..., Rows]
    columns_last: bool = False
    experts: bool = False


@dataclass(frozen=True)
class Matmul:
    """A matmul's input, its view, and the extra inputs that assign rows to matrices."""

    source: Node
    operand: Operand
    view: MatmulView
    extra_inputs: tuple[Node, ...] = ()

    @property
    def position(self) -> int:
        """Return the input's position in the arguments."""
        return self.operand.position


def matmul_of(node: Node, weight: Node) -> Matmul | None:
    """Return the matmul of a node with a weight, or with rows gathered from it; None if its input rows are unknown."""
    name = operator_name(called(node))
    operands = operands_of(node)[:2] if name in OPERANDS else ()
    if len(operands) < 2:
        return None
    for side in (1, 0):
        other = operands[1 - side]
        source = argument_of(node, other)
        if source is None or operand_node(node, operands[side]) is not weight:
            continue
        made = _MAKERS.get(name, _contraction)(node, weight, side)
        if made is not None:
            view, extra_inputs = made
            return Matmul(source, other, view, extra_inputs)
    return None


def same_matrices(views: Iterable[MatmulView], shape: torch.Size) -> bool:
    """Return True if all views make the same matrices of a weight of that shape."""
    functions = list(dict.fromkeys(view.to_matrices for view in views))
    if len(functions) < 2:
        return True
    numbers = torch.arange(shape.numel()).reshape(shape)
    first = functions[0](numbers)
    return all(torch.equal(function(numbers), first) for function in functions[1:])


def columns_are_last(matmul: Matmul) -> bool:
    """Return True if the columns are the last dimension of the input, and the input is an argument by itself."""
    return matmul.view.columns_last and matmul.operand.item is None


def without_padding(matmul: Matmul, mask: Node) -> Matmul:
    """Return the matmul restricted to the rows where a mask, (batch, sequence), is not zero.

    A matmul whose rows differ from the rows of the mask is returned unchanged.
    """
    rows, sizes = matmul.view.rows, value_of(mask).shape
    if not isinstance(rows, Matrices) or rows.groups or rows.rows != tuple(range(len(rows.rows))):
        return matmul
    leading = value_of(matmul.source).shape[: len(rows.rows)]
    if not leading or str(tuple(leading)) not in (str(tuple(sizes)), str((sizes.numel(),))):
        return matmul
    return replace(matmul, view=replace(matmul.view, rows=_Unmasked(rows)), extra_inputs=(mask,))


@dataclass(frozen=True)
class _Unmasked:
    """Input, mask -> the rows where the mask is not zero."""

    rows: Matrices

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.rows(x)[:, mask.flatten() != 0]


@dataclass(frozen=True)
class _GatheredExperts:
    """Input, the expert of each of its groups -> the rows of each expert."""

    rows: Matrices
    experts: int

    def __call__(self, x: Tensor, ids: Tensor) -> Rows:
        ids = ids % self.experts
        sizes = torch.bincount(ids, minlength=self.experts).tolist()
        rows = self.rows(x)[ids.argsort(stable=True)]
        return [group.flatten(0, 1).unsqueeze(0) for group in rows.split(sizes)]


def _rows_by_expert(x: Tensor, ends: Tensor) -> Rows:
    """Split an input that is sorted by expert, at the end of each expert's rows."""
    bounds = [0, *ends.tolist()]
    return [x[first:last].unsqueeze(0) for first, last in pairwise(bounds)]


_View = tuple[MatmulView, tuple[Node, ...]]


def _contraction(node: Node, weight: Node, side: int) -> _View | None:
    arguments = arguments_of(node)[:2]
    first, second = (shape_of(argument) or () for _, argument in arguments)
    contraction = contraction_of(node, first, second)
    if contraction is None:
        return None
    matrices, rows = contraction.matrices(side), contraction.matrices(1 - side)
    view = MatmulView(matrices.columns[-1], matrices, matrices.inverse, rows, rows.columns_last)
    operand, argument = arguments[side]
    gather = gather_of(argument, operand)
    if gather is None:
        return view, ()
    (ids,) = args_of(gather)[1]
    experts = (shape_of(weight) or ())[0]
    numbers = dtype_of(ids) in (torch.int64, torch.int32) and len(shape_of(ids) or ()) == 1
    if matrices.groups != (0,) or not numbers or not isinstance(experts, int):
        return None
    return replace(view, rows=_GatheredExperts(rows, experts), experts=True), (ids,)


def _grouped(node: Node, weight: Node, side: int) -> _View | None:
    """x: (rows, K), W: (experts, K, N)."""
    x, w = args_of(node)[:2]
    ends = named_args(node)["offs"]
    if side != 1 or len(shape_of(x) or ()) != 2 or len(shape_of(w) or ()) != 3 or not isinstance(ends, Node):
        return None
    matrices = Matrices((0,), (2,), (1,))
    return MatmulView(1, matrices, matrices.inverse, _rows_by_expert, columns_last=True, experts=True), (ends,)


def _convolution(node: Node, weight: Node, side: int) -> _View | None:
    """W: (N, K / groups, *taps), transposed (K, N / groups, *taps): one line of channels for each tap. In a group of
    one channel, a line has the taps of the last kernel dimension that is larger than 1."""
    call, shape = Convolution.of(node), shape_of(weight) or ()
    if call is None or side != 1:
        return None
    arguments, taps = named_args(node), tuple(int(size) for size in shape[2:])
    spatial = tuple(range(2, len(shape)))
    if call.transposed:
        if call.groups != 1:  # blocks run across the groups
            return None
        matrices = Matrices((), (1,), (*spatial, 0))

        def from_flipped(matrix: Tensor, shape: torch.Size) -> Tensor:
            return matrices.inverse(matrix, shape).flip(spatial)

        rows = partial(im2col_transposed, taps=taps, arguments=arguments)
        return MatmulView(0, lambda w: matrices(w.flip(spatial)), from_flipped, rows), ()
    lines, axis = Matrices((), (0,), (*spatial, 1)), reduced_axis(shape, call.groups > 1)

    def to_groups(w: Tensor) -> Tensor:
        return lines(w).unflatten(1, (call.groups, -1)).squeeze(0)

    rows = partial(im2col, groups=call.groups, taps=taps, arguments=arguments)
    return MatmulView(axis, to_groups, lines.inverse, rows), ()


#: operators whose weight is not one factor of an einsum
_MAKERS: dict[str, Callable[[Node, Node, int], _View | None]] = {
    **dict.fromkeys(map(operator_name, (*CONVOLUTIONS, aten.convolution.default)), _convolution),
    **dict.fromkeys(("aten._grouped_mm", "transformers.grouped_mm_fallback"), _grouped),
}


def im2col(x: Tensor, groups: int, taps: tuple[int, ...], arguments: dict[str, Any]) -> Tensor:
    """Return the patches of a convolution's input, (groups, rows, taps * channels), channels fastest.

    If there are more patches than an observer takes, this samples them before it copies them.

    Args:
        arguments: stride, padding and dilation.
    """
    dims = len(taps)
    stride, dilation = _each(arguments["stride"], dims), _each(arguments["dilation"], dims)
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    x = pad(x, _padding(arguments["padding"], taps, dilation))
    for i in range(dims):
        x = x.unfold(2 + i, dilation[i] * (taps[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    x = x.unflatten(1, (groups, -1))  # (B, groups, channels, positions, ..., taps, ...)
    positions, kernel = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    x = x.permute(1, 0, *positions, *kernel, 2)
    counts = x.shape[1 : 2 + dims]
    if (total := counts.numel()) > ROWS:
        index: tuple[Any, ...] = (slice(None), *torch.unravel_index(sample(total, x.device), counts))
        return x[index].flatten(2)
    return x.flatten(2 + dims).flatten(1, 1 + dims)


def im2col_transposed(x: Tensor, taps: tuple[int, ...], arguments: dict[str, Any]) -> Tensor:
    """Return the rows multiplied with the flipped taps of a transposed convolution, (1, rows, taps * channels).

    A transposed convolution is a convolution of its input with zeros inserted between the values.
    """
    dims = len(taps)
    stride, dilation = _each(arguments["stride"], dims), _each(arguments["dilation"], dims)
    padding, output_padding = _each(arguments["padding"], dims), _each(arguments["output_padding"], dims)
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    sizes: list[int] = []
    sides: list[int] = []
    every: tuple[Any, ...] = (...,)
    for i, size in enumerate(x.shape[2:]):
        sizes.append((size - 1) * stride[i] + 1)
        every = (*every, slice(None, None, stride[i]))
        side = dilation[i] * (taps[i] - 1) - padding[i]
        sides = [side, side + output_padding[i], *sides]  # `pad` takes the last dimension first
    spread = x.new_zeros(*x.shape[:2], *sizes)
    spread[every] = x
    return im2col(pad(spread, sides), 1, taps, {"stride": [1], "padding": [0], "dilation": dilation})


def _padding(padding: Any, taps: tuple[int, ...], dilation: list[int]) -> list[int]:
    """Return the arguments of `pad`, from the last dimension on."""
    sides: list[int] = []
    for i, size in enumerate(taps):
        total = dilation[i] * (size - 1) if padding == "same" else 0
        before, after = total // 2, total - total // 2
        if not isinstance(padding, str):
            before = after = _each(padding, len(taps))[i]
        sides = [before, after, *sides]
    return sides


def _each(values: list[int], dims: int) -> list[int]:
    return list(values) * dims if len(values) == 1 else list(values)


aten = torch.ops.aten

Shape = tuple[int | str, ...]
Labels = tuple[Hashable, ...]


@dataclass(frozen=True)
class Matrices:
    """A view of a tensor as (groups, rows, columns): the dimensions that form each, the last one fastest."""

    groups: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Return x as (groups, rows, columns)."""
        sizes = [prod(x.shape[i] for i in dims) for dims in (self.groups, self.rows, self.columns)]
        return x.permute(self._order).reshape(sizes)

    def inverse(self, matrices: Tensor, shape: torch.Size) -> Tensor:
        """Return (groups, rows, columns) as the tensor of that shape."""
        x = matrices.reshape([shape[i] for i in self._order])
        return x.permute(torch.tensor(self._order).argsort().tolist()).contiguous()

    @property
    def columns_last(self) -> bool:
        """Return True if the columns are the tensor's last dimension."""
        return self.columns == (len(self._order) - 1,)

    @property
    def _order(self) -> tuple[int, ...]:
        return self.groups + self.rows + self.columns


class Contraction(NamedTuple):
    """The labels of both factors, and the reduced ones; MX blocks run along the last reduced label."""

    first: Labels
    second: Labels
    reduced: Labels

    def matrices(self, factor: int) -> Matrices:
        """Return the first (0) or second (1) factor as matrices, whose columns are the reduced dimensions."""
        labels, other = (self.first, self.second) if factor == 0 else (self.second, self.first)
        groups = [label for label in self.first if label in self.second and label not in self.reduced]
        rows = [label for label in labels if label not in other]
        position = labels.index
        return Matrices(tuple(map(position, groups)), tuple(map(position, rows)), tuple(map(position, self.reduced)))


def contraction_of(node: Node, first: Shape, second: Shape) -> Contraction | None:
    """Return the contraction that a node computes of factors of these shapes.

    None for other operators, and if the operator broadcasts a dimension within a label.
    """
    if node.target not in _CONTRACTIONS:
        return None
    contraction = _CONTRACTIONS[node.target](node, first, second)
    if contraction is None:
        return None
    sizes = dict(zip(contraction.second, second, strict=True))
    for label, size in zip(contraction.first, first, strict=True):
        if sizes.get(label, size) != size:
            return None
    return contraction


def _matmul(node: Node, first: Shape, second: Shape) -> Contraction:
    """(..., rows, k) x (..., k, n), either a vector (k,) too."""
    left = (*_batch(first[:-2], second[:-2]), "rows", "k") if len(first) > 1 else ("k",)
    right = (*_batch(second[:-2], first[:-2]), "k", "n") if len(second) > 1 else ("k",)
    return Contraction(left, right, ("k",))


def _batch(shape: Shape, other: Shape) -> Labels:
    """Return the labels of dimensions that are matched from the right; a broadcast dimension has its own label."""
    labels: list[Hashable] = []
    for i in range(len(shape), 0, -1):
        broadcast = shape[-i] == 1 and (i > len(other) or other[-i] != 1)
        labels.append(f"broadcast {i}" if broadcast else i)
    return tuple(labels)


def _sum_of_matmuls(node: Node, first: Shape, second: Shape) -> Contraction:
    """(b, rows, k) x (b, k, n), summed over b."""
    return Contraction(("b", "rows", "k"), ("b", "k", "n"), ("b", "k"))


def _inner(node: Node, first: Shape, second: Shape) -> Contraction:
    """(..., k) x (..., k), also x @ W.T."""
    left = [("first", i) for i in range(len(first) - 1)]
    right = [("second", i) for i in range(len(second) - 1)]
    return Contraction((*left, "k"), (*right, "k"), ("k",))


def _tensordot(node: Node, first: Shape, second: Shape) -> Contraction | None:
    right: list[Hashable] = [("second", j) for j in range(len(second))]
    reduced: list[Hashable] = []
    for i, j in zip(*args_of(node)[2:4], strict=True):
        reduced.append(i % len(first))
        right[j] = i % len(first)
    return Contraction(tuple(range(len(first))), tuple(right), tuple(reduced)) if reduced else None


def _einsum(node: Node, first: Shape, second: Shape) -> Contraction | None:
    if einsum_axes(node) is None:
        return None
    terms, arrow, output = args_of(node)[0].replace(" ", "").partition("->")
    left_term, right_term = terms.split(",")
    left, right = _expanded(left_term, first), _expanded(right_term, second)
    summed = [label for label in (*left, *right) if isinstance(label, str) and label not in output]
    reduced = tuple(label for label in left if label in right and label in summed)
    if arrow and not set(summed) <= set(reduced):  # it sums over a dimension of one factor
        return None
    return Contraction(left, right, reduced)


def _expanded(term: str, shape: Shape) -> Labels:
    """Return the labels of an einsum term; the dimensions of an ellipsis are numbered from its right."""
    head, _, tail = term.partition("...")
    return (*head, *range(len(shape) - len(head) - len(tail), 0, -1), *tail)


_CONTRACTIONS: dict[object, Callable[[Node, Shape, Shape], Contraction | None]] = {
    **dict.fromkeys((aten.linear.default, aten.inner.default), _inner),
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), _matmul),
    **dict.fromkeys((aten.matmul.default, aten.linalg_matmul.default, aten.mv.default, aten.addmv.default), _matmul),
    **dict.fromkeys((aten.dot.default, aten.vdot.default), _matmul),
    aten.addbmm.default: _sum_of_matmuls,
    aten.tensordot.default: _tensordot,
    aten.einsum.default: _einsum,
}
