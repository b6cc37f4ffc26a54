"""The products whose weights are optimized: the weight as matrices, and the input as the rows that meet them.

A product is `rows @ matrix.T`, in groups that have nothing to do with each other: the groups of a convolution, the
matrices of a batched product. Blocks run along the columns, anew with each line: a convolution has a line of channels
for each tap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2mx.fx.graph.convolution import CONVOLUTIONS, Convolution
from pt2mx.fx.graph.node import args_of, named_args, shape_of
from pt2mx.pt2e.optimize.hessian_observer import ROWS, sample

aten = torch.ops.aten


@dataclass(frozen=True)
class Layout:
    """A weight as matrices, and the rows that they are multiplied with.

    Args:
        axis: the dimension of the weight along which its blocks run.
        to_matrices: weight -> (groups, N, K).
        from_matrices: (groups, N, K), the weight's shape -> weight.
        rows: input -> (groups, rows, K).
    """

    axis: int
    to_matrices: Callable[[Tensor], Tensor]
    from_matrices: Callable[[Tensor, torch.Size], Tensor]
    rows: Callable[[Tensor], Tensor]


def _flat(x: Tensor) -> Tensor:
    """(..., K) -> (1, rows, K)."""
    return x.reshape(1, x.shape[:-1].numel(), x.shape[-1])


def _batched(x: Tensor) -> Tensor:
    """(..., rows, K) -> (groups, rows, K)."""
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _from_matrices(matrices: Tensor, shape: torch.Size) -> Tensor:
    return matrices.reshape(shape)


def _out_in(node: Node, weight: Node) -> Layout | None:
    """x @ W.T, W: (N, K)."""
    if len(shape_of(weight) or ()) != 2:
        return None
    return Layout(1, lambda w: w.unsqueeze(0), _from_matrices, _flat)


def _in_out(node: Node, weight: Node) -> Layout | None:
    """x @ W, W: (K,), (K, N), or (..., K, N), whose matrices have rows of x of their own."""
    shape = shape_of(weight) or ()
    rank = len(shape)
    if rank == 1:
        return Layout(0, lambda w: w.view(1, 1, -1), _from_matrices, _flat)
    one = all(size == 1 for size in shape[:-2])
    if not one and (shape_of(args_of(node)[0]) or ())[:-2] != shape[:-2]:  # x or the matrices are broadcast
        return None
    return Layout(
        rank - 2,
        lambda w: w.reshape(-1, *w.shape[-2:]).mT,
        lambda matrices, shape: matrices.mT.reshape(shape),
        _flat if one else _batched,
    )


def _convolution(node: Node, weight: Node) -> Layout | None:
    """W: (N, K / groups, *taps): a line for each tap, of channels."""
    call = Convolution.of(node)
    if call is None or call.transposed:
        return None
    arguments = {**named_args(node), "taps": (shape_of(weight) or ())[2:]}

    def to_matrices(w: Tensor) -> Tensor:
        return w.movedim(1, -1).reshape(call.groups, w.shape[0] // call.groups, -1)

    def from_matrices(matrices: Tensor, shape: torch.Size) -> Tensor:
        return matrices.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()

    return Layout(1, to_matrices, from_matrices, lambda x: patches(x, call.groups, arguments))


def patches(x: Tensor, groups: int, arguments: dict[str, Any]) -> Tensor:
    """The windows of a convolution's input ("im2col"), (groups, rows, taps * channels), channels fastest; of many those
    that an observer takes, chosen before they are copied."""
    taps = arguments["taps"]
    dims = len(taps)
    stride, dilation = (_each(arguments[name], dims) for name in ("stride", "dilation"))
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    x = torch.nn.functional.pad(x, _padding(arguments["padding"], taps, dilation))
    for i in range(dims):
        x = x.unfold(2 + i, dilation[i] * (taps[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    x = x.unflatten(1, (groups, -1))  # (B, groups, channels, windows, ..., taps, ...)
    windows, inside = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    x = x.permute(1, 0, *windows, *inside, 2)
    counts = x.shape[1 : 2 + dims]
    if (total := counts.numel()) > ROWS:
        index: tuple[Any, ...] = (slice(None), *torch.unravel_index(sample(total, x.device), counts))
        return x[index].flatten(2)
    return x.flatten(2 + dims).flatten(1, 1 + dims)


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


_Maker = Callable[[Node, Node], "Layout | None"]

#: operator -> positions of x and of the weight, and what makes their layout
_PRODUCTS: dict[object, tuple[int, int, _Maker]] = {
    aten.linear.default: (0, 1, _out_in),
    aten.addmm.default: (1, 2, _in_out),
    aten.mm.default: (0, 1, _in_out),
    aten.bmm.default: (0, 1, _in_out),
    aten.matmul.default: (0, 1, _in_out),
    **dict.fromkeys((*CONVOLUTIONS, aten.convolution.default), (0, 1, _convolution)),
}


@dataclass(frozen=True)
class Product:
    """An input, its position in the arguments, and how it meets a weight."""

    source: Node
    position: int
    layout: Layout


def product_of(node: Node, weight: Node) -> Product | None:
    """The product that a node makes of a weight; None where the weight is no second factor of one of the table."""
    if node.target not in _PRODUCTS:
        return None
    x, second, make = _PRODUCTS[node.target]
    source, factor = args_of(node)[x], args_of(node)[second]
    layout = make(node, weight) if factor is weight and isinstance(source, Node) else None
    return None if layout is None else Product(source, x, layout)


def reads_rows(product: Product) -> bool:
    """True if the rows are those of the input as it is, (..., K)."""
    return product.layout.rows is _flat
