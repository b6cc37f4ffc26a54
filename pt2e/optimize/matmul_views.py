"""The products whose weights are optimized: the weight as matrices, and the input as the rows that meet them.

A product is `rows @ matrix.T`, in groups that have nothing to do with each other: the groups of a convolution, the
matrices of a batched product, the experts of a mixture. Blocks run along the columns, anew with each line: a
convolution has a line of channels for each tap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from pt2mx.fx.graph.convolution import CONVOLUTIONS, Convolution
from pt2mx.fx.graph.node import args_of, called, dtype_of, named_args, shape_of, value_of
from pt2mx.pt2e.optimize.matmul_dims import Matrices, contraction_of
from pt2mx.pt2e.optimize.observers import ROWS, Rows, sample
from pt2mx.pt2e.quantizer.operators import (
    OPERANDS,
    Operand,
    argument_of,
    gather_of,
    operand_node,
    operands_of,
    operator_name,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Layout:
    """A weight as matrices, and the rows that they are multiplied with.

    Args:
        axis: the dimension of the weight along which its blocks run.
        to_matrices: weight -> (groups, N, K).
        from_matrices: (groups, N, K), the weight's shape -> weight.
        rows: input, and what the product has beside it -> (groups, rows, K), or (1, rows, K) for each group.
        columns_last: True if the columns are the last dimension of the input.
        experts: True if the groups are experts, which share out the rows among them.
    """

    axis: int
    to_matrices: Callable[[Tensor], Tensor]
    from_matrices: Callable[[Tensor, torch.Size], Tensor]
    rows: Callable[..., Rows]
    columns_last: bool = False
    experts: bool = False


@dataclass(frozen=True)
class Product:
    """An input, how it meets a weight, and the further nodes that tell which of its rows meet which matrix."""

    source: Node
    operand: Operand
    layout: Layout
    beside: tuple[Node, ...] = ()

    @property
    def position(self) -> int:
        """The input's position in the arguments."""
        return self.operand.position


def product_of(node: Node, weight: Node) -> Product | None:
    """The product that a node makes of a weight, or of what it gathers from one; None where its rows are not known."""
    name = operator_name(called(node))
    operands = operands_of(node)[:2] if name in OPERANDS else ()
    for own, other in ((1, 0), (0, 1)) if len(operands) == 2 else ():
        source = argument_of(node, operands[other])
        if source is None or operand_node(node, operands[own]) is not weight:
            continue
        if (found := _MAKERS.get(name, _contraction)(node, weight, own)) is not None:
            layout, beside = found
            return Product(source, operands[other], layout, beside)
    return None


def arranged_alike(layouts: Iterable[Layout], shape: torch.Size) -> bool:
    """True if all layouts make the same matrices of a weight of that shape."""
    ways = list(dict.fromkeys(layout.to_matrices for layout in layouts))
    if len(ways) < 2:
        return True
    numbers = torch.arange(shape.numel()).reshape(shape)
    return all(torch.equal(way(numbers), ways[0](numbers)) for way in ways)


def reads_rows(product: Product) -> bool:
    """True if the columns are the last dimension of the input, which is an argument of its own."""
    return product.layout.columns_last and product.operand.item is None


def without_padding(product: Product, mask: Node) -> Product:
    """The product of the rows where a mask, (batch, sequence), is not zero. One whose rows are not those of the mask
    stays."""
    rows, sizes = product.layout.rows, value_of(mask).shape
    if not isinstance(rows, Matrices) or rows.groups or rows.rows != tuple(range(len(rows.rows))):
        return product
    leading = value_of(product.source).shape[: len(rows.rows)]
    if not leading or str(tuple(leading)) not in (str(tuple(sizes)), str((sizes.numel(),))):
        return product
    return replace(product, layout=replace(product.layout, rows=_Unmasked(rows)), beside=(mask,))


@dataclass(frozen=True)
class _Unmasked:
    """Input, mask -> the rows where the mask is not zero."""

    rows: Matrices

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.rows(x)[:, mask.flatten() != 0]


@dataclass(frozen=True)
class _Chosen:
    """Input, the expert of each of its groups -> the rows of each expert."""

    rows: Matrices
    experts: int

    def __call__(self, x: Tensor, ids: Tensor) -> Rows:
        ids = ids % self.experts
        sizes = torch.bincount(ids, minlength=self.experts).tolist()
        rows = self.rows(x)[ids.argsort(stable=True)]
        return [group.flatten(0, 1).unsqueeze(0) for group in rows.split(sizes)]


def _sorted(x: Tensor, ends: Tensor) -> Rows:
    """Input, whose rows are sorted by experts, and the end of each expert's -> the rows of each expert."""
    bounds = [0, *ends.tolist()]
    return [x[first:last].unsqueeze(0) for first, last in pairwise(bounds)]


_Found = tuple[Layout, tuple[Node, ...]]


def _contraction(node: Node, weight: Node, own: int) -> _Found | None:
    operands = operands_of(node)[:2]
    shapes = [shape_of(argument_of(node, operand)) or () for operand in operands]
    if (found := contraction_of(node, *shapes)) is None:
        return None
    matrices, rows = found.matrices(own), found.matrices(1 - own)
    layout = Layout(matrices.columns[-1], matrices, matrices.inverse, rows, rows.columns_last)
    gather = gather_of(node, operands[own])
    if gather is None:
        return layout, ()
    (ids,) = args_of(gather)[1]
    experts = (shape_of(weight) or ())[0]
    numbers = dtype_of(ids) in (torch.int64, torch.int32) and len(shape_of(ids) or ()) == 1
    if matrices.groups != (0,) or not numbers or not isinstance(experts, int):
        return None
    return replace(layout, rows=_Chosen(rows, experts), experts=True), (ids,)


def _grouped(node: Node, weight: Node, own: int) -> _Found | None:
    """x: (rows, K), W: (experts, K, N)."""
    ends = named_args(node)["offs"]
    ranks = [len(shape_of(args_of(node)[i]) or ()) for i in (0, 1)]
    if own != 1 or ranks != [2, 3] or not isinstance(ends, Node):
        return None
    matrices = Matrices((0,), (2,), (1,))
    return Layout(1, matrices, matrices.inverse, _sorted, columns_last=True, experts=True), (ends,)


def _convolution(node: Node, weight: Node, own: int) -> _Found | None:
    """W: (N, K / groups, *taps), transposed (K, N / groups, *taps): a line for each tap, of channels."""
    call, shape = Convolution.of(node), shape_of(weight) or ()
    if call is None or own != 1:
        return None
    arguments, taps = named_args(node), tuple(int(size) for size in shape[2:])
    spatial = tuple(range(2, len(shape)))
    if call.transposed:
        if call.groups != 1:  # blocks run across the groups
            return None
        matrices = Matrices((), (1,), (*spatial, 0))

        def from_flipped(found: Tensor, shape: torch.Size) -> Tensor:
            return matrices.inverse(found, shape).flip(spatial)

        rows = partial(windows_of_transposed, taps=taps, arguments=arguments)
        return Layout(0, lambda w: matrices(w.flip(spatial)), from_flipped, rows), ()
    lines = Matrices((), (0,), (*spatial, 1))

    def to_groups(w: Tensor) -> Tensor:
        return lines(w).unflatten(1, (call.groups, -1)).squeeze(0)

    rows = partial(windows, groups=call.groups, taps=taps, arguments=arguments)
    return Layout(1, to_groups, lines.inverse, rows), ()


#: operators whose layouts are not those of a contraction
_MAKERS: dict[str, Callable[[Node, Node, int], _Found | None]] = {
    **dict.fromkeys(map(operator_name, (*CONVOLUTIONS, aten.convolution.default)), _convolution),
    **dict.fromkeys(("aten._grouped_mm", "transformers.grouped_mm_fallback"), _grouped),
}


def windows(x: Tensor, groups: int, taps: tuple[int, ...], arguments: dict[str, Any]) -> Tensor:
    """The windows of a convolution's input, (groups, rows, taps * channels), channels fastest; of many those that an
    observer takes, chosen before they are copied. `arguments`: stride, padding and dilation."""
    dims = len(taps)
    stride, dilation = (_each(arguments[name], dims) for name in ("stride", "dilation"))
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    x = pad(x, _padding(arguments["padding"], taps, dilation))
    for i in range(dims):
        x = x.unfold(2 + i, dilation[i] * (taps[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    x = x.unflatten(1, (groups, -1))  # (B, groups, channels, windows, ..., taps, ...)
    outside, inside = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    x = x.permute(1, 0, *outside, *inside, 2)
    counts = x.shape[1 : 2 + dims]
    if (total := counts.numel()) > ROWS:
        index: tuple[Any, ...] = (slice(None), *torch.unravel_index(sample(total, x.device), counts))
        return x[index].flatten(2)
    return x.flatten(2 + dims).flatten(1, 1 + dims)


def windows_of_transposed(x: Tensor, taps: tuple[int, ...], arguments: dict[str, Any]) -> Tensor:
    """The rows that meet the flipped taps of a transposed convolution, (1, rows, taps * channels): it is a convolution
    of its input with zeros between the values."""
    dims = len(taps)
    names = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, behind = (_each(arguments[name], dims) for name in names)
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    spread = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)))
    every: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    spread[every] = x
    sides = [d * (k - 1) - p for d, k, p in zip(dilation, taps, padding, strict=True)]
    pairs = [(side, side + more) for side, more in zip(sides, behind, strict=True)]
    spread = pad(spread, [side for pair in reversed(pairs) for side in pair])
    return windows(spread, 1, taps, {"stride": [1], "padding": [0], "dilation": dilation})


def _padding(padding: Any, taps: tuple[int, ...], dilation: list[int]) -> list[int]:
    """The arguments of `pad`, from the last dimension on."""
    if isinstance(padding, str):
        whole = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, taps, strict=True)]
        sides = [(total // 2, total - total // 2) for total in whole]
    else:
        sides = [(p, p) for p in _each(padding, len(taps))]
    return [side for pair in reversed(sides) for side in pair]


def _each(values: list[int], dims: int) -> list[int]:
    return list(values) * dims if len(values) == 1 else list(values)
