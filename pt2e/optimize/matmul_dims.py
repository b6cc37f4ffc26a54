"""Classify the dimensions of a matmul of two tensors: batch, row, column, or reduced.

The dimensions of both operands get labels, as in an einsum. A label of the input alone is a row of the result, and a
label of the weight alone is a column. A label of both operands is reduced, or it numbers independent matmuls (groups).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from pt2mx.fx.graph.node import args_of
from pt2mx.pt2e.quantizer.operators import einsum_axes

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
