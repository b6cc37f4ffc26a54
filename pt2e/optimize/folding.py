"""Fold channel factors into the parameters before a tensor, if the graph proves that nothing else changes.

A factor has the rank of its node; each dimension is 1 or the node's. The folder propagates it from a node back to the
parameters before it, such as the scale of a norm or the rows of a linear layer. Each node on the way must have one
user, and scaling its input must scale its result. For powers of two this is exact, except for values that overflow or
become subnormal. A parameter that would lose precision this way gets no factor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import args_of, attribute_of, dtype_of, named_args, shape_of, tensor_of
from pt2mx.fx.graph.tensors import replace_tensor
from pt2mx.ops.checks import HIGH_PRECISION

aten = torch.ops.aten


class Scaled(NamedTuple):
    """A node whose value is to be multiplied by a factor that broadcasts to it."""

    node: Node
    factor: Tensor


#: alternatives for scaling a node's result, each a list of nodes to scale instead
_Ways = list[list[Scaled]]


class Folder:
    """Folds factors into parameters that the graph does not write."""

    def __init__(self, model: GraphModule, in_place: bool = False) -> None:
        self.model, self.in_place, self.written = model, in_place, written_nodes(model.graph)
        values = {node: id(attribute_of(model, node)) for node in model.graph.find_nodes(op="get_attr")}
        reads: Counter[int] = Counter()
        for node, value in values.items():
            reads[value] += _reads(node)
        #: parameter node -> number of reads of the parameter, under any name; folding replaces the parameter
        self.reads = {node: reads[value] for node, value in values.items()}

    def fold(self, node: Node, factor: Tensor) -> list[str]:
        """Multiply a node's value by a factor of its last dimension, (K,), by changing parameters.

        Returns the names of these parameters, none where folding is impossible.
        """
        shape = shape_of(node)
        if shape is None or node in self.written:
            return []
        edits = self._edits(node, factor.reshape((1,) * (len(shape) - 1) + factor.shape)) or []
        changes: list[tuple[Tensor, Tensor]] = []
        for parameter, change in edits:
            value = tensor_of(self.model, parameter)
            scaled = _scaled(value, change)
            if scaled is None:
                return []
            changes.append((value, scaled))
        for value, scaled in changes:
            replace_tensor(self.model, value, scaled, self.in_place)
        return [str(parameter.target) for parameter, _ in edits]

    def _edits(self, node: Node, factor: Tensor) -> list[Scaled] | None:
        """Return the parameters to scale instead of a node; None where that is impossible."""
        if node in self.written:
            return None
        if node.op == "get_attr":
            return self._parameter(node, factor)
        if node.target not in _WAYS or not _broadcasts(factor, shape_of(node) or ()):
            return None
        for way in _WAYS[node.target](node, factor):
            edits = self._edits_of_all(way)
            if edits is not None:
                return edits
        return None

    def _edits_of_all(self, way: list[Scaled]) -> list[Scaled] | None:
        edits: list[Scaled] = []
        for node, factor in way:
            found = self._edits(node, factor) if node.op == "get_attr" or _reads(node) == 1 else None
            if found is None:
                return None
            edits += found
        return edits

    def _parameter(self, node: Node, factor: Tensor) -> list[Scaled] | None:
        value = attribute_of(self.model, node)
        if not isinstance(value, Tensor) or not value.is_floating_point() or self.reads.get(node) != 1:
            return None
        while factor.dim() > value.dim() and len(factor) == 1:
            factor = factor.squeeze(0)
        if factor.dim() > value.dim() or not _broadcasts(factor, value.shape[value.dim() - factor.dim() :]):
            return None
        return [Scaled(node, factor)]


def _scaled(value: Tensor, factor: Tensor) -> Tensor | None:
    """Return a parameter times a factor that broadcasts to it; None if that loses precision.

    Values that overflow or become subnormal may lose at most the square of the dtype's precision, relative to the
    largest value with the same factor.
    """
    scaled = value * factor.to(value.dtype)
    lost = (scaled.double() / factor.double() - value.double()).abs()
    largest = value.double().abs()
    one_factor = [i for i in range(-value.dim(), 0) if i < -factor.dim() or factor.shape[i] == 1]
    if one_factor:
        lost, largest = lost.amax(one_factor), largest.amax(one_factor)
    return scaled if bool((lost <= torch.finfo(value.dtype).eps ** 2 * largest).all()) else None


def _reads(node: Node) -> int:
    """Count how often a graph reads a node; `x @ x` counts twice."""
    return sum(pytree.tree_leaves((user.args, user.kwargs)).count(node) for user in node.users)


def _broadcasts(factor: Tensor, shape: tuple[int | str, ...]) -> bool:
    return factor.dim() == len(shape) and all(f in (1, n) for f, n in zip(factor.shape, shape, strict=True))


def _same(node: Node, factor: Tensor) -> _Ways:
    """Scale the first argument. The result is that argument, or zero where it is negative."""
    return [[Scaled(node.all_input_nodes[0], factor)]]


def _cast(node: Node, factor: Tensor) -> _Ways:
    """Scale the argument of a cast, except to integers or 8 bits, whose rounding steps do not scale."""
    dtypes = {dtype_of(node), dtype_of(node.all_input_nodes[0])}
    return _same(node, factor) if dtypes <= set(HIGH_PRECISION) else []


def _dropout(node: Node, factor: Tensor) -> _Ways:
    return [] if named_args(node)["train"] else _same(node, factor)


def _view(node: Node, factor: Tensor) -> _Ways:
    """Scale the argument, if trailing dimensions of it hold the dimensions of the factor."""
    before, after = shape_of(node.all_input_nodes[0]) or (), shape_of(node) or ()
    first = 0
    while first < factor.dim() and factor.shape[first] == 1:
        first += 1
    tail = _static(after[first:])
    for i in range(len(before) + 1):
        same = _static(before[i:])
        if tail is not None and same is not None and math.prod(same) == math.prod(tail):
            whole = factor.reshape(factor.shape[first:]).expand(tail)
            return [[Scaled(node.all_input_nodes[0], whole.reshape((1,) * i + same))]]
    return []


def _static(shape: tuple[int | str, ...]) -> tuple[int, ...] | None:
    known = tuple(n for n in shape if isinstance(n, int))
    return known if len(known) == len(shape) else None


def _transpose(node: Node, factor: Tensor) -> _Ways:
    source, *dims = args_of(node)
    return [[Scaled(source, factor.transpose(*dims))]]


def _permute(node: Node, factor: Tensor) -> _Ways:
    source, dims = args_of(node)
    inverse = torch.tensor(dims).remainder(factor.dim()).argsort()
    return [[Scaled(source, factor.permute(inverse.tolist()))]]


def _mul(node: Node, factor: Tensor) -> _Ways:
    """Scale one of the two operands, a parameter if possible."""
    operands = [x for x in args_of(node)[:2] if isinstance(x, Node)]
    if len(set(operands)) < 2:
        return []
    operands.sort(key=lambda x: x.op != "get_attr")
    return [[Scaled(x, factor)] for x in operands]


def _norm(node: Node, factor: Tensor) -> _Ways:
    args = named_args(node)
    dims = len(args["normalized_shape"])
    if args["weight"] is None or factor.shape[:-dims].numel() != 1:
        return []
    factor = factor.reshape(factor.shape[-dims:])
    way = [Scaled(args["weight"], factor)]
    if args.get("bias") is not None:
        way.append(Scaled(args["bias"], factor))
    return [way]


def _rows(node: Node, factor: Tensor) -> _Ways:
    """x @ W.T + b: scale the rows of W, and b."""
    args = named_args(node)
    return _weight_and_bias(args["weight"], (-1, 1), args["bias"], factor)


def _columns(node: Node, factor: Tensor) -> _Ways:
    """b + x @ W: scale the columns of W, and b."""
    args = named_args(node)
    if (args["beta"], args["alpha"]) != (1, 1):
        return []
    return _weight_and_bias(args["mat2"], (1, -1), args["self"], factor)


def _weight_and_bias(weight: Node, shape: tuple[int, int], bias: Node | None, factor: Tensor) -> _Ways:
    if weight.op != "get_attr" or factor.numel() != factor.shape[-1]:
        return []
    vector = factor.reshape(-1)
    way = [Scaled(weight, vector.reshape(shape))]
    if bias is not None:
        way.append(Scaled(bias, vector))
    return [way]


def _attention(node: Node, factor: Tensor) -> _Ways:
    """Scale the values: each result is a sum of them along the second-last dimension."""
    value = args_of(node)[2]
    return _second(value, shape_of(node) or (), factor)


def _matmul(node: Node, factor: Tensor) -> _Ways:
    return _second(args_of(node)[1], shape_of(node) or (), factor)


def _second(value: Node, shape: tuple[int | str, ...], factor: Tensor) -> _Ways:
    """Scale the second factor of a matmul, if its other dimensions are dimensions of the result."""
    before = shape_of(value) or ()
    same = len(before) == len(shape) and before[:-2] == shape[:-2] and before[-1:] == shape[-1:]
    return [[Scaled(value, factor)]] if same and len(before) >= 2 and factor.shape[-2] == 1 else []


#: operator -> the alternatives for scaling its result
_WAYS: dict[object, Callable[[Node, Tensor], _Ways]] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int), _view),
    **dict.fromkeys((aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default), _same),
    **dict.fromkeys((aten.to.dtype, aten._to_copy.default), _cast),
    aten.relu.default: _same,
    aten.flatten.using_ints: _view,
    aten.dropout.default: _dropout,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.mul.Tensor: _mul,
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.linear.default: _rows,
    aten.addmm.default: _columns,
    aten.scaled_dot_product_attention.default: _attention,
    aten.matmul.default: _matmul,
    aten.bmm.default: _matmul,
}
